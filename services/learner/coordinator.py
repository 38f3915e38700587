"""Rank 0's dealings with the other services: issues cohorts, gathers groups, publishes versions, settles entries.

Everything here runs on one event loop in a thread of its own, so that streams and publishing go on while the learner
trains. Decisions are made in `cohorts` and `evaluation`; this module only carries them out.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from offbeat.config import Recipe
from offbeat.errors import BacklogFull, OffbeatError, ServiceUnavailable
from offbeat.ledger import Ledger
from offbeat.streams.base import Delivery, LearnerStreams, Member
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import samples_pb2 as samples
from offbeat.weights.client import CheckpointClient, PublishBase
from offbeat.weights.manifest import describe
from services.learner.cohorts import Cohorts, Place, Verdict
from services.learner.evaluation import Evaluation, Evaluator
from services.learner.tasks import TaskMaker

log = logging.getLogger(__name__)

REISSUE_SECONDS = 60.0
"""Time without a new result after which absent ordinals are looked for; also done after every reconnect."""
OUTAGE_SECONDS = 600.0
"""Longest outage of Redis that the learner sits out."""
FINISH_SECONDS = 30.0
CLOSE_SECONDS = 10.0
PUBLISH_SECONDS = 600.0
"""Longest time for a publish, restarts of the checkpoint service included."""


@dataclass(frozen=True)
class Publication:
    """Weights to publish: the manifest but for its tensors, and name, dtype, shape and bytes of each tensor."""

    manifest: checkpoint.Manifest
    tensors: list[tuple[str, str, tuple[int, ...], memoryview]]

    @property
    def buffers(self) -> list[Any]:
        """The bytes of each tensor."""
        return [buffer for *_, buffer in self.tensors]


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
        self._tasks = tasks
        self._evaluator = evaluator
        self.on_evaluation: Callable[[Evaluation, dict[str, float]], None] = (
            lambda evaluation, metrics: None
        )
        self.on_publish: Callable[[int, Publication, float], None] = (
            lambda version, publication, seconds: None
        )
        self._arrived = asyncio.Condition()
        self._publishing = asyncio.Lock()
        self._published: PublishBase | None = None
        self._last_arrival = time.monotonic()
        self._issued_at: dict[int, float] = {}
        self._inherited: set[int] = set()
        self._unsettled: list[tuple[int, int, Delivery | None, int]] = []
        self._issuing: asyncio.Task[None] | None = None
        self.backlog_full = False
        self._collector: asyncio.Task[None] | None = None
        self.members: list[Member] = []
        self.term = 0
        self.ledger: Ledger | None = None

    # --- start and end

    async def start(self, *, learner_id: str, term_floor: int, needed_bytes: int) -> int:
        """Takes over the run: a new term, everywhere. Returns the term."""
        await self._streams.prepare(needed_bytes=needed_bytes)
        floor = max(self.cohorts.lineage.versions, default=0)
        reply = await self._weights.acquire_learner(
            learner_id, term_floor=term_floor, version_floor=floor
        )
        self.term = reply.term
        await self._streams.begin_term(self.term)
        return self.term

    async def close(self, *, finished: bool) -> None:
        """Ends the collector and the connections; `finished` tells the workers that the run is over."""
        if finished:
            await _within(FINISH_SECONDS, "telling the workers", self._streams.finish())
        for task in (self._issuing, self._collector):
            if task is not None:
                await _end(task)
        await _within(CLOSE_SECONDS, "closing the streams", self._streams.close())
        await _within(CLOSE_SECONDS, "closing the channel", self._weights.close())

    # --- weights

    async def publish(self, publication: Publication, *, evaluate: bool, whole: bool) -> int:
        """Publishes a version and returns it. Its evaluation and the cohorts that it admits are issued afterwards.

        Issuing may have to wait for room in Redis, which only settled entries give; so nothing waits for issuing.
        """
        given = publication.manifest
        given.term = self.term
        given.parent = max(self.cohorts.lineage.versions, default=0)
        began = time.monotonic()
        # Hashing takes longer than anything else here, and needs neither this loop nor the thread that trains.
        given.MergeFrom(await asyncio.to_thread(describe, publication.tensors))
        async with self._publishing:
            reply = await self._weights.publish(
                given,
                publication.buffers,
                base=self._published,
                deadline_seconds=PUBLISH_SECONDS,
            )
            if self._recipe.checkpoint.deltas:
                self._published = PublishBase(reply.manifest, publication.buffers)
            version = reply.manifest.version
            self.cohorts.lineage.add(version, given.step, given.update)
        self._record("publish", version=version, parent=given.parent, step=given.step)
        self.on_publish(version, publication, time.monotonic() - began)
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
                    self._issued_at[ordinal] = time.monotonic()
                    self._inherited.add(ordinal)
        if self._inherited:
            log.info("%d groups of the last term are still under way", len(self._inherited))

    def _task(self, ordinal: int, attempt: int) -> samples.PromptTask:
        self._issued_at[ordinal] = time.monotonic()
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
        """The next step's cohort, in ordinal order; None when it is not complete after `wait_seconds`."""
        try:
            async with asyncio.timeout(wait_seconds), self._arrived:
                await self._arrived.wait_for(
                    lambda: self._collector_died() or self.cohorts.complete()
                )
        except TimeoutError:
            return None
        self._raise_if_died()
        step = self.cohorts.next_step
        popped = self.cohorts.pop()
        if all(place.group is None for _, place in popped):
            raise OffbeatError(
                f"every group of step {step} was given up, so there is nothing to train on; "
                f"the first one: {popped[0][1].dead}"
            )
        for ordinal, place in popped:
            self._issued_at.pop(ordinal, None)
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
                await self._arrived.wait_for(
                    lambda: self._collector_died() or not evaluator.pending
                )
        except TimeoutError:
            return False
        self._raise_if_died()
        return True

    def _collector_died(self) -> bool:
        issuing = (
            self._issuing is not None
            and self._issuing.done()
            and self._issuing.exception() is not None
        )
        return issuing or (self._collector is not None and self._collector.done())

    def _raise_if_died(self) -> None:
        for task in (self._issuing, self._collector):
            if task is not None and task.done():
                task.result()

    async def _collect(self) -> None:
        try:
            await self._collect_for_ever()
        finally:
            async with self._arrived:
                self._arrived.notify_all()

    async def _collect_for_ever(self) -> None:
        checked = time.monotonic()
        broken_since: float | None = None
        while True:
            try:
                found = await self._streams.collect(limit=64, wait_seconds=1.0)
                if broken_since is not None:
                    broken_since = None
                    await self._reissue_absent("Redis came back")
                await self._handle(found)
                idle = time.monotonic() - max(checked, self._last_arrival)
                if idle > REISSUE_SECONDS:
                    await self._reissue_absent("no result for a while")
                    checked = time.monotonic()
                self._give_up_late()
                self.members = await self._streams.members()
            except ServiceUnavailable as error:
                broken_since = broken_since or time.monotonic()
                if time.monotonic() - broken_since > OUTAGE_SECONDS:
                    raise
                log.warning("the streams can't be reached, trying again: %s", error)
                await asyncio.sleep(0.5)

    async def _handle(self, found: Iterable[Delivery]) -> None:
        done: list[Delivery] = []
        for delivery in found:
            self._last_arrival = time.monotonic()
            dead = isinstance(delivery.record, samples.DeadLetter)
            keep = await (self._handle_dead(delivery) if dead else self._handle_group(delivery))
            if not keep:
                done.append(delivery)
        if done:
            await self._streams.settle(done, [])
        async with self._arrived:
            self._arrived.notify_all()

    async def _handle_group(self, delivery: Delivery[samples.ScoredRollout]) -> bool:
        """Whether the entry stays pending: True for an accepted group, False for all that can be settled at once."""
        task = delivery.record.rollout.task
        if task.kind == samples.TASK_KIND_EVALUATION:
            if self._evaluator is not None:
                self._finish_evaluation(self._evaluator.add(delivery.record))
            return False
        problem = malformed(delivery.record)
        if problem is None:
            if not self.cohorts.lineage.contains(delivery.record.rollout):
                # A fast generator can answer with a version whose publish has not returned here yet.
                async with self._publishing:
                    pass
            verdict = self.cohorts.add_group(delivery)
            if verdict is Verdict.ACCEPTED:
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
        return verdict is Verdict.ACCEPTED

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

    def _give_up_late(self) -> None:
        """Groups past their deadline are normally given up by a worker; one that got lost is given up here."""
        limit = self._recipe.schedule.group_deadline_seconds * 1.5
        now = time.monotonic()
        if not any(member.role == "generator" for member in self.members):
            return  # nobody could have done them
        # While results arrive, the queue moves, and a place in it is no fault of the group.
        late = [o for o, at in self._issued_at.items() if now - max(at, self._last_arrival) > limit]
        for ordinal in late:
            reason = f"no result {limit:g} s after it was issued (schedule.group_deadline_seconds and half again)"
            if self.cohorts.add_dead(ordinal, reason) is Verdict.ACCEPTED:
                log.warning("ordinal %d is dead: %s", ordinal, reason)
            del self._issued_at[ordinal]

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


async def _end(task: "asyncio.Task[None]") -> None:
    """Ends a task. A cancellation can meet an operation that is just ending and get lost in it: it is repeated."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)


async def _within(seconds: float, what: str, work: Coroutine[Any, Any, None]) -> None:
    """Waits for the work, but no longer than that: the run is done, and its process must end."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        log.error("%s did not end within %g s; going on without", what, seconds)
        task.cancel()
    elif task.exception() is not None:
        log.error("%s failed: %s", what, task.exception())


def without_payload(delivery: Delivery) -> Delivery:
    """The delivery as it is kept until a checkpoint contains it: what was learned from it is not needed any more."""
    if isinstance(delivery.record, samples.DeadLetter):
        return delivery
    task = delivery.record.rollout.task
    bare = samples.PromptTask(ordinal=task.ordinal, attempt=task.attempt, kind=task.kind)
    return replace(delivery, record=samples.ScoredRollout(rollout=samples.Rollout(task=bare)))


def malformed(record: samples.ScoredRollout) -> str | None:
    """Why a scored group can't be trained on: its parts do not fit together; None when they do."""
    rollout = record.rollout
    k = rollout.task.k
    if len(rollout.completions) != k or len(record.scores) != k:
        return f"expected {k} completions and scores, found {len(rollout.completions)} and {len(record.scores)}"
    for index, completion in enumerate(rollout.completions):
        tokens = len(completion.token_ids)
        counted = sum(span.count for span in completion.version_spans)
        if len(completion.logprobs) != tokens or counted != tokens:
            return (
                f"completion {index}: {tokens} tokens, {len(completion.logprobs)} log-probs, "
                f"versions of {counted} tokens; expected the same number of each"
            )
    return None


def waiting_times(members: Iterable[Member], role: str) -> dict[str, tuple[float, float]]:
    """Seconds without work and seconds since the start, by member, for the workers of a role that tell."""
    return {
        member.member_id: (
            float(member.info["waiting_seconds"]),
            float(member.info["uptime_seconds"]),
        )
        for member in members
        if member.role == role and "uptime_seconds" in member.info
    }


def waiting_fraction(
    members: Iterable[Member], role: str, earlier: Mapping[str, tuple[float, float]]
) -> float | None:
    """Mean share of the time since `earlier` that a role's workers waited; None when none of them tells."""
    shares = []
    for member_id, (waited, uptime) in waiting_times(members, role).items():
        waited_before, uptime_before = earlier.get(member_id, (0.0, 0.0))
        if uptime > uptime_before:
            shares.append((waited - waited_before) / (uptime - uptime_before))
    return sum(shares) / len(shares) if shares else None
