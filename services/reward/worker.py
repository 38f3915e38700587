"""The reward worker's loop: rollouts in, scores out.

A batch of groups is scored in one go. When that fails, each of its groups is scored by itself, so that only the guilty
one is failed. `run` ends when it is asked to (drain), or by an error after which going on makes no sense.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from offbeat.config.workers import RewardSettings
from offbeat.errors import DataError, RewardError, ServiceUnavailable
from offbeat.streams.base import Delivery, Stream, WorkerStreams
from offbeat.telemetry.activity import Activity
from offbeat.v1 import samples_pb2
from services.reward.calling import Scorer
from services.reward.counters import Counters
from services.reward.policy import StopPolicy, Watchdog
from services.reward.records import Sample, samples_of_rollout
from services.reward.scoring import FunctionBlocked, FunctionFailed, FunctionStuck

log = logging.getLogger(__name__)

HAND_BACK_SECONDS = 5.0

Rollouts = Delivery[samples_pb2.Rollout]
Group = tuple[Rollouts, list[Sample]]


class BrokenFunction(RewardError):
    """A reward function fails on everything; starting again does not help."""


class Worker:
    """Takes groups, scores them, hands them on."""

    def __init__(
        self,
        streams: WorkerStreams,
        scorer: Scorer,
        settings: RewardSettings,
        counters: Counters,
        *,
        worker_id: str,
        beat_seconds: float,
        on_alive: Callable[[bool], Awaitable[None]],
        activity: Activity | None = None,
    ) -> None:
        """`on_alive` is told at each beat whether there is progress."""
        self._streams = streams
        self._scorer = scorer
        self._settings = settings
        self._counters = counters
        self._worker_id = worker_id
        self._beat_seconds = beat_seconds
        self._on_alive = on_alive
        self._activity = activity or Activity.none()
        self._policy = StopPolicy()
        # A call may take timeout_seconds; a beat more leaves room for what surrounds it.
        self._watchdog = Watchdog(settings.timeout_seconds + beat_seconds)
        self._held: dict[tuple[Stream, str], Rollouts] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop`, then finishes what is under way in the time that drains get, and hands the rest back.

        Raises `BrokenFunction`, `FunctionStuck` or `FunctionBlocked`, after which the process must end, and
        `ServiceUnavailable` when Redis stays away.
        """
        beats, work = asyncio.create_task(self._beat()), asyncio.create_task(self._work(stop))
        try:
            # Without heartbeats all that is held would be claimed by others, again and again.
            await asyncio.wait({beats, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, beats):
                task.cancel()
            await asyncio.wait({work, beats})
            await self._hand_back()
        for task in (work, beats):
            if not task.cancelled():
                task.result()

    async def _work(self, stop: asyncio.Event) -> None:
        stopped = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                deliveries = await self._take()
                if deliveries and not stop.is_set():
                    await self._finish_or_drain(
                        asyncio.create_task(self._process(deliveries)), stopped
                    )
        finally:
            stopped.cancel()

    async def _take(self) -> list[Rollouts]:
        self._activity.enter("idle")
        with self._counters.waiting():
            deliveries: list[Rollouts] = await self._streams.take(self._settings.max_groups)
        self._held = {delivery.key: delivery for delivery in deliveries}
        self._counters.groups_in_flight = len(self._held)
        if deliveries:
            self._activity.enter("score")
        return deliveries

    async def _finish_or_drain(
        self, batch: asyncio.Task[None], stopped: asyncio.Task[bool]
    ) -> None:
        grace = self._settings.rpc.drain_seconds
        try:
            await asyncio.wait({batch, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not batch.done():
                await asyncio.wait({batch}, timeout=grace)
            if not batch.done():
                log.warning("scoring was not done within the %g s of a drain", grace)
        finally:
            batch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await batch
        self._watchdog.idle()

    async def _hand_back(self) -> None:
        """Gives back what is still held. Without Redis it is claimed by others once it was idle for long enough."""
        if not self._held:
            return
        log.info("handing %d groups back", len(self._held))
        with contextlib.suppress(TimeoutError, ServiceUnavailable):
            async with asyncio.timeout(HAND_BACK_SECONDS):
                await self._streams.hand_back(list(self._held.values()))
        self._held.clear()
        self._counters.groups_in_flight = 0

    # --- one batch ---------------------------------------------------------------------------------------------

    async def _process(self, deliveries: Sequence[Rollouts]) -> None:
        groups: list[Group] = []
        for delivery in deliveries:
            try:
                groups.append((delivery, samples_of_rollout(delivery.record)))
            except DataError as error:
                await self._fail(delivery, f"malformed rollout: {error}", final=True)
        if groups:
            await self._score(groups)

    async def _score(self, groups: Sequence[Group]) -> None:
        started = _now_ms()
        self._watchdog.progress(time.monotonic())
        try:
            scores = await self._scorer.score(
                [sample for _, samples in groups for sample in samples]
            )
        except FunctionBlocked:
            raise
        except FunctionStuck as error:
            for delivery, _ in groups:
                await self._fail(delivery, str(error), final=False)
            raise
        except FunctionFailed as error:
            await self._failed(groups, error)
            return
        parts = _split(scores, [len(samples) for _, samples in groups])
        await asyncio.gather(
            *(
                self._hand_off(delivery, part, started)
                for (delivery, _), part in zip(groups, parts, strict=True)
            )
        )

    async def _failed(self, groups: Sequence[Group], error: FunctionFailed) -> None:
        if len(groups) > 1:
            log.info(
                "scoring %d groups together failed, scoring each by itself: %s", len(groups), error
            )
            for group in groups:
                await self._score([group])
            return
        delivery, _ = groups[0]
        task = delivery.record.task
        log.warning("group %d could not be scored", task.ordinal, exc_info=error)
        # Not final: what failed may be a service behind the function. The second failure, alone, is.
        await self._fail(delivery, str(error), final=False)
        self._policy.failed(error.function, (task.kind, task.evaluation_id, task.ordinal))
        if self._policy.broken_function is not None:
            raise BrokenFunction(
                f"{error} (it failed on {self._policy.limit} groups in a row and scored none in between, so the "
                "worker stops instead of giving up all groups of the run; correct the function and start again)"
            ) from error

    async def _hand_off(
        self, delivery: Rollouts, scores: list[samples_pb2.CompletionScore], started_unix_ms: int
    ) -> None:
        self._policy.scored()
        if delivery.key not in self._held:
            return  # a peer has claimed it, and will hand it on
        scored = samples_pb2.ScoredRollout(
            scores=scores,
            reward_worker_id=self._worker_id,
            started_unix_ms=started_unix_ms,
            finished_unix_ms=_now_ms(),
        )
        first = await self._streams.hand_off(delivery, scored)
        self._release(delivery)
        if first:
            self._counters.groups_finished += 1
            self._counters.completions_scored += len(scores)
        else:
            log.info("group %d was handed on by a peer already", delivery.record.task.ordinal)

    async def _fail(self, delivery: Rollouts, reason: str, *, final: bool) -> None:
        await self._streams.fail(delivery, reason, final=final)
        self._release(delivery)
        self._counters.groups_dead += final or delivery.alone

    def _release(self, delivery: Rollouts) -> None:
        self._held.pop(delivery.key, None)
        self._counters.groups_in_flight = len(self._held)
        self._watchdog.progress(time.monotonic())

    # --- signs of life -----------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Sends heartbeats, also while idle, but none once a batch makes no progress."""
        while True:
            alive = self._watchdog.alive(time.monotonic())
            await self._on_alive(alive)
            if alive:
                await self._beat_once()
            else:
                log.error(
                    "no progress for longer than reward.timeout_seconds; sending no heartbeat"
                )
            await asyncio.sleep(self._beat_seconds)

    async def _beat_once(self) -> None:
        try:
            lost = await self._streams.beat(list(self._held.values()))
        except ServiceUnavailable as error:
            log.warning("no heartbeat: %s", error)  # `take` decides when it is time to give up
            return
        for key in lost:
            if self._held.pop(key, None) is not None:
                log.warning("%s %s was claimed by a peer; its result here is dropped", *key)
        self._counters.groups_in_flight = len(self._held)


def _split(
    scores: list[samples_pb2.CompletionScore], sizes: Sequence[int]
) -> list[list[samples_pb2.CompletionScore]]:
    rest = iter(scores)
    return [list(itertools.islice(rest, size)) for size in sizes]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
