"""Rank 0's dealings with the other services: issues cohorts, gathers groups, publishes versions, settles entries.

Everything here runs on one event loop in a thread of its own, so that streams and publishing go on while the learner
trains. Decisions are made in `cohorts` and `evaluation`; this module only carries them out.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from offbeat.config import Recipe
from offbeat.errors import BacklogFull, OffbeatError, ServiceUnavailable
from offbeat.ledger import Ledger
from offbeat.streams.base import Delivery, LearnerStreams, Member
from offbeat.v1 import samples_pb2 as samples
from offbeat.weights.client import CheckpointClient
from services.learner.cohorts import Cohorts, Place, Verdict
from services.learner.ending import end, within
from services.learner.entries import malformed, without_payload
from services.learner.evaluation import Evaluation, Evaluator
from services.learner.patience import Patience
from services.learner.tasks import TaskMaker
from services.learner.versions import Publication, Versions

log = logging.getLogger(__name__)

OUTAGE_SECONDS = 600.0
"""Longest outage of Redis that the learner sits out."""
MEMBERS_SECONDS = 1.0
"""How often the workers are looked at: about ten commands, which arrivals must not wait for each time."""
FINISH_SECONDS = 30.0
CLOSE_SECONDS = 10.0


class Coordinator:
    """See the module. Made and used on its event loop."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        streams: LearnerStreams,
        weights: CheckpointClient,
        cohorts: Cohorts,
        tasks: TaskMaker,
        evaluator: Evaluator | None,
    ) -> None:
        self._recipe = recipe
        self._streams = streams
        self._weights = weights
        self.cohorts = cohorts
        self.versions = Versions(weights, cohorts.lineage, keep=recipe.checkpoint.deltas)
        self._tasks = tasks
        self._evaluator = evaluator
        self.on_evaluation: Callable[[Evaluation, dict[str, float]], None] = (
            lambda evaluation, metrics: None
        )
        self._arrived = asyncio.Condition()
        # A worker gives a group up at its deadline; half as much again means that it got lost.
        self._patience = Patience(1.5 * recipe.schedule.group_deadline_seconds)
        self._inherited: set[int] = set()
        self._unsettled: list[tuple[int, int, Delivery | None, int]] = []
        self._issuing: asyncio.Task[None] | None = None
        self.backlog_full = False
        self._collector: asyncio.Task[None] | None = None
        self._guard: asyncio.Task[None] | None = None
        self._hurried = False
        self.members: list[Member] = []
        self.on_members: Callable[[list[Member]], None] = lambda members: None
        self.evaluated_groups = 0
        """Results of evaluations that arrived."""
        self.term = 0
        self.ledger: Ledger | None = None

    # --- start and end

    async def start(
        self, *, learner_id: str, term_floor: int, version_floor: int, needed_bytes: int
    ) -> int:
        """Takes over the run: a new term, everywhere. Returns the term."""
        await self._streams.prepare(needed_bytes=needed_bytes)
        self.term = await self.versions.acquire(
            learner_id, term_floor=term_floor, version_floor=version_floor
        )
        await self._streams.begin_term(self.term)
        return self.term

    async def close(self, *, finished: bool) -> None:
        """Ends the collector and the connections; `finished` tells the workers that the run is over."""
        if finished:
            await within(FINISH_SECONDS, "telling the workers", self._streams.finish())
        for task in self._running:
            await end(task, CLOSE_SECONDS)
        await within(CLOSE_SECONDS, "closing the streams", self._streams.close())
        await within(CLOSE_SECONDS, "closing the channel", self._weights.close())

    # --- weights

    async def publish(self, publication: Publication, *, evaluate: bool, whole: bool) -> int:
        """Publishes a version and returns it. Its evaluation and the cohorts that it admits are issued afterwards.

        Issuing may have to wait for room in Redis, which only settled entries give; so nothing waits for issuing.
        """
        version = await self.versions.publish(publication)
        given = publication.manifest
        self._record("publish", version=version, parent=given.parent, step=given.step)
        opened: list[samples.PromptTask] = []
        if evaluate and self._evaluator is not None:
            opened = self._evaluator.start(
                step=given.step, version=version, term=self.term, whole=whole
            )
        self._issuing = asyncio.create_task(self._open(opened, self._issuing), name="issuing")
        return version

    async def _open(
        self, evaluation: list[samples.PromptTask], before: "asyncio.Task[None] | None"
    ) -> None:
        """Issues an evaluation and what is admitted now, after what was issued before."""
        if before is not None:
            await before
        await self._issue(evaluation)
        admitted = self.cohorts.admit()
        if self._collector is None:
            # Not earlier: results of the last term belong to cohorts that are admitted only now.
            await self._inherit(admitted)
            self._collector = asyncio.create_task(self._collect(), name="collector")
            self._guard = asyncio.create_task(self._guard_versions(), name="guard of the versions")
        for cohort in admitted:
            ordinals, version = self.cohorts.ordinals(cohort), self.cohorts.min_version(cohort)
            self._record(
                "issue", cohort=cohort, first=ordinals[0], last=ordinals[-1], min_version=version
            )
            fresh = [ordinal for ordinal in ordinals if ordinal not in self._inherited]
            await self._issue([self._task(ordinal, 0) for ordinal in fresh])

    async def _inherit(self, cohorts: Iterable[int]) -> None:
        """What the last term issued, and is still under way, is not issued again."""
        in_flight = await self._streams.in_flight()
        for cohort in cohorts:
            for ordinal in self.cohorts.ordinals(cohort):
                if ordinal in in_flight:
                    self.cohorts.inherit(ordinal, in_flight[ordinal].attempt)
                    self._patience.issued(ordinal, time.monotonic())
                    self._inherited.add(ordinal)
        if self._inherited:
            log.info("%d groups of the last term are still under way", len(self._inherited))

    def _task(self, ordinal: int, attempt: int) -> samples.PromptTask:
        self._patience.issued(ordinal, time.monotonic())
        cohort = ordinal // self._recipe.schedule.cohort_size
        version = self.cohorts.min_version(cohort)
        return self._tasks.make(ordinal, attempt=attempt, term=self.term, min_version=version)

    async def _issue(self, tasks: list[samples.PromptTask]) -> None:
        warned = False
        while True:
            try:
                await self._streams.issue(tasks)
                self.backlog_full = False
                return
            except BacklogFull as error:
                if not warned:
                    log.warning("issuing waits: %s", error)
                warned = self.backlog_full = True
                await asyncio.sleep(0.5)

    # --- gathering

    async def cohort(self, wait_seconds: float) -> list[tuple[int, Place]] | None:
        """The next step's cohort, in ordinal order; None when it is not complete after `wait_seconds`, or `hurry`."""
        try:
            async with asyncio.timeout(wait_seconds), self._arrived:
                await self._arrived.wait_for(
                    lambda: self._hurried or self._somebody_died() or self.cohorts.complete()
                )
        except TimeoutError:
            return None
        self._raise_if_died()
        if not self.cohorts.complete():
            return None
        step = self.cohorts.next_step
        popped = self.cohorts.pop()
        if all(place.group is None for _, place in popped):
            raise OffbeatError(
                f"every group of step {step} was given up, so there is nothing to train on; "
                f"the first one: {popped[0][1].dead}"
            )
        for ordinal, place in popped:
            self._patience.done(ordinal)
            self._inherited.discard(ordinal)
            size = place.group.ByteSize() if place.group is not None else 0
            self._unsettled.append(
                (step, ordinal, place.delivery and without_payload(place.delivery), size)
            )
        return popped

    async def evaluated(self, wait_seconds: float) -> bool:
        """Whether no evaluation is open any more, after waiting up to `wait_seconds`."""
        if self._evaluator is None:
            return True
        evaluator = self._evaluator
        try:
            async with asyncio.timeout(wait_seconds), self._arrived:
                await self._arrived.wait_for(lambda: self._somebody_died() or not evaluator.pending)
        except TimeoutError:
            return False
        self._raise_if_died()
        return True

    async def hurry(self) -> None:
        """From now on nobody waits for a cohort that is not complete: the run is to stop."""
        self._hurried = True
        await self._notify()

    async def _notify(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    @property
    def _running(self) -> list["asyncio.Task[None]"]:
        tasks = (self._issuing, self._collector, self._guard)
        return [task for task in tasks if task is not None]

    def _somebody_died(self) -> bool:
        return any(
            task.done() and (task.cancelled() or task.exception() is not None)
            for task in self._running
        )

    def _raise_if_died(self) -> None:
        for task in self._running:
            if task.done():
                task.result()

    async def _guard_versions(self) -> None:
        try:
            await self.versions.guard(self._published_again)
        finally:
            await self._notify()

    async def _published_again(self, version: int, publication: Publication) -> None:
        given = publication.manifest
        self._record("publish", version=version, parent=given.parent, step=given.step)

    async def _collect(self) -> None:
        try:
            await self._collect_for_ever()
        finally:
            await self._notify()

    async def _collect_for_ever(self) -> None:
        broken_since: float | None = None
        looked_at = 0.0
        while True:
            try:
                found = await self._streams.collect(limit=64, wait_seconds=1.0)
                if broken_since is not None:
                    broken_since = None
                    await self._reissue_absent("Redis came back")
                await self._handle(found)
                if self._patience.should_search(time.monotonic()):
                    await self._reissue_absent("no result for a while")
                if time.monotonic() - looked_at >= MEMBERS_SECONDS:
                    self.members = await self._streams.members()
                    self.on_members(self.members)
                    looked_at = time.monotonic()
                    await self._give_up_late()
            except ServiceUnavailable as error:
                broken_since = broken_since or time.monotonic()
                if time.monotonic() - broken_since > OUTAGE_SECONDS:
                    raise
                log.warning("the streams can't be reached, trying again: %s", error)
                await asyncio.sleep(0.5)

    async def _handle(self, found: Iterable[Delivery]) -> None:
        done: list[Delivery] = []
        for delivery in found:
            self._patience.arrived(time.monotonic())
            dead = isinstance(delivery.record, samples.DeadLetter)
            keep = await (self._handle_dead(delivery) if dead else self._handle_group(delivery))
            if not keep:
                done.append(delivery)
        if done:
            await self._streams.settle(done, [])
        await self._notify()

    async def _handle_group(self, delivery: Delivery[samples.ScoredRollout]) -> bool:
        """Whether the entry stays pending: True for an accepted group, False for all that can be settled at once."""
        task = delivery.record.rollout.task
        if task.kind == samples.TASK_KIND_EVALUATION:
            self.evaluated_groups += 1
            if self._evaluator is not None:
                self._finish_evaluation(self._evaluator.add(delivery.record))
            return False
        problem = malformed(delivery.record)
        if problem is None:
            if not self.cohorts.lineage.contains(delivery.record.rollout):
                # A fast generator can answer with a version whose publish has not returned here yet.
                await self.versions.settled()
            verdict = self.cohorts.add_group(delivery)
            if verdict is Verdict.ACCEPTED:
                return True
            if verdict is Verdict.DUPLICATE and self._keeps(delivery):
                return True
            if verdict is Verdict.DUPLICATE:
                log.info(
                    "ordinal %d attempt %d dropped: it has a result already",
                    task.ordinal,
                    task.attempt,
                )
                return False
            problem = f"generated by {verdict} weights"
        if task.ordinal in self.cohorts.missing():
            attempt = self.cohorts.next_attempt(task.ordinal, task.attempt)
            self._record("reissue", ordinal=task.ordinal, attempt=attempt, why=problem)
            await self._streams.retire(delivery, self._task(task.ordinal, attempt))
            return True
        return False

    async def _handle_dead(self, delivery: Delivery[samples.DeadLetter]) -> bool:
        letter = delivery.record
        if letter.kind == samples.TASK_KIND_EVALUATION:
            log.warning(
                "evaluation %s: prompt %d is dead: %s",
                letter.evaluation_id,
                letter.ordinal,
                letter.reason,
            )
            if self._evaluator is not None:
                self._finish_evaluation(
                    self._evaluator.add_dead(letter.evaluation_id, letter.ordinal)
                )
            return False
        verdict = self.cohorts.add_dead(
            letter.ordinal, letter.reason, delivery, attempt=letter.attempt
        )
        if verdict is Verdict.ACCEPTED:
            log.warning("ordinal %d is dead: %s", letter.ordinal, letter.reason)
        return verdict is Verdict.ACCEPTED or self._keeps(delivery)

    def _keeps(self, delivery: Delivery) -> bool:
        """Whether the entry itself was accepted before: a Redis that forgot so delivers it once more."""
        kept = [place.delivery for place in self.cohorts.places] + [
            item[2] for item in self._unsettled
        ]
        return any(other is not None and other.key == delivery.key for other in kept)

    def _finish_evaluation(self, evaluation: Evaluation | None) -> None:
        if evaluation is not None and self._evaluator is not None:
            self.on_evaluation(
                evaluation, evaluation.metrics(self._evaluator.settings.pass_threshold)
            )

    # --- what gets lost

    async def _reissue_absent(self, why: str) -> None:
        """Issues again what is expected and not under way in Redis: it was emptied, rolled back, or lost an entry."""
        if self._evaluator is not None:
            # An attempt number would tell nothing here: the first result wins, and issuing is idempotent.
            await self._issue(
                [task for open_one in self._evaluator.pending for task in open_one.unanswered]
            )
        in_flight = await self._streams.in_flight()
        absent = [ordinal for ordinal in self.cohorts.missing() if ordinal not in in_flight]
        if not absent:
            return
        log.warning(
            "%d ordinals are issued again (%s): they were gone from Redis", len(absent), why
        )
        attempts = {ordinal: self.cohorts.next_attempt(ordinal) for ordinal in absent}
        for ordinal, attempt in attempts.items():
            self._record("reissue", ordinal=ordinal, attempt=attempt, why=why)
        await self._issue([self._task(ordinal, attempt) for ordinal, attempt in attempts.items()])

    async def _give_up_late(self) -> None:
        """Groups past their deadline are normally given up by a worker; one that got lost is given up here."""
        possible = {member.role for member in self.members} >= {"generator", "reward"}
        late = self._patience.late(time.monotonic(), possible=possible)
        for ordinal in late:
            reason = (
                f"no result for {self._patience.limit_seconds:g} s, though there were workers "
                "(schedule.group_deadline_seconds and half again)"
            )
            if self.cohorts.add_dead(ordinal, reason) is Verdict.ACCEPTED:
                log.warning("ordinal %d is dead: %s", ordinal, reason)
        if late:
            await self._notify()

    # --- settling

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation has no complete result yet."""
        return self._evaluator is not None and bool(self._evaluator.pending)

    @property
    def unsettled_bytes(self) -> int:
        """Payload of trained groups that no durable checkpoint contains yet."""
        return sum(size for *_, size in self._unsettled)

    async def settle(self, before_step: int) -> None:
        """A durable checkpoint contains all steps below `before_step`: their entries go."""
        done = [item for item in self._unsettled if item[0] < before_step]
        self._unsettled = [item for item in self._unsettled if item[0] >= before_step]
        deliveries = [delivery for _, _, delivery, _ in done if delivery is not None]
        await self._streams.settle(deliveries, [ordinal for _, ordinal, _, _ in done])

    def _record(self, event: str, **fields: Any) -> None:
        if self.ledger is not None:
            self.ledger.write(event, **fields)
