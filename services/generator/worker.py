"""The generator's loop: prompt tasks in, rollouts out, weights swapped in between.

    take -> run (k requests in the engine) -> trusted? -> hand off
             ^ cancelled when a peer claimed the entry, restarted after a load that went wrong

The loop alone takes entries and swaps weights; each group runs in a task of its own. An error of any of them that is
not the group's own ends the loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from offbeat.config.workers import GeneratorSettings
from offbeat.errors import DataError, EngineError, ServiceUnavailable
from offbeat.failpoints import failpoint
from offbeat.streams.base import Stream, WorkerStreams
from offbeat.telemetry.activity import Activity
from offbeat.v1 import samples_pb2 as samples
from offbeat.weights.staged import StagedWeights
from services.generator.counters import Counters
from services.generator.engines import Engine, EngineFailed
from services.generator.held import Group, Identity, Prompts, until
from services.generator.planning import Watchdog, may_swap, version_for_late
from services.generator.records import now_unix_ms, requests_of, rollout_of
from services.generator.sampling_group import sample_group
from services.generator.staging import Stager
from services.generator.updates import Updater

log = logging.getLogger(__name__)

TAKE_SECONDS = 1.0
LOOK_AGAIN_SECONDS = 0.1
HAND_BACK_SECONDS = 5.0
SWAP_SECONDS = 900.0
"""Longest time of a load and its parity check; heartbeats go on meanwhile, though there are no steps."""
OVERDUE_SECONDS = 300.0
"""A version that was announced so long ago and is not held makes the generator not ready."""


class Worker:
    """Takes groups, has them sampled, hands them on."""

    def __init__(
        self,
        streams: WorkerStreams,
        engine: Engine,
        updater: Updater,
        stager: Stager,
        settings: GeneratorSettings,
        counters: Counters,
        *,
        identity: Identity,
        k: int,
        beat_seconds: float,
        group_seconds: float,
        on_health: Callable[[bool, bool], Awaitable[None]],
        activity: Activity | None = None,
    ) -> None:
        """`k` is the usual size of a group, `group_seconds` the longest time for one; `on_health` is told at each beat:
        alive, ready.
        """
        self._streams = streams
        self._engine = engine
        self._updater = updater
        self._stager = stager
        self._settings = settings
        self._counters = counters
        self._identity = identity
        self._k = k
        self._beat_seconds = beat_seconds
        self._group_seconds = group_seconds
        self._on_health = on_health
        self._activity = activity or Activity.none()
        self._watchdog = Watchdog(settings.stall_seconds)
        self._groups: dict[tuple[Stream, str], Group] = {}
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._failure: BaseException | None = None
        self._swapping = False
        self._behind_since: float | None = None
        self._held_up_since: float | None = None
        self._asked_beyond = 0
        self._impatient_past = 0
        self._stop = asyncio.Event()
        self._drained = asyncio.Event()
        self.finished_in_drain = 0
        self.returned_in_drain = 0
        self._grace_seconds = settings.rpc.drain_seconds
        self._drain_until = float("inf")

    # --- the loop ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Makes the loop look around: something changed."""
        self._wake.set()
        self._room.set()

    async def drain(self, grace_seconds: float | None = None) -> None:
        """Makes `run` end, and waits until it did. Not ready from now on."""
        if not self._stop.is_set():
            self._counters.draining = True
            self._drain_until = time.monotonic() + (grace_seconds or self._grace_seconds)
            self._stop.set()
            self.wake()
            await self._tell_health(alive=not self._watchdog.stalled(time.monotonic()))
        await self._drained.wait()

    async def run(self) -> None:
        """Works until `drain`, then finishes what is under way within the grace, and hands the rest back.

        Raises `EngineFailed`, `WeightsError`, or `ServiceUnavailable` when going on makes no sense. Then nothing is
        handed back: entries that killed the engine must not come back as if they were innocent.
        """
        endless = (self._beat_for_ever(), self._stager.watch(), self._stager.stage_wanted())
        background = [asyncio.create_task(work) for work in endless]
        for task in background:
            task.add_done_callback(self._note_end)
        self._count_groups()
        try:
            await self._announce()
            while not self._stop.is_set():
                await self._advance_or_drain()
                self._raise_failure()
            await self._finish()
        finally:
            for task in background:
                task.cancel()
            await self._cancel(self._groups.values())
            await asyncio.gather(*background, return_exceptions=True)
            self._drained.set()

    async def _advance_or_drain(self) -> None:
        """One round. Of a drain it gets no more than the grace time: a load of weights may take longer than that."""
        advance = asyncio.create_task(self._advance())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({advance, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not advance.done():
                await asyncio.wait({advance}, timeout=self._grace_left)
        finally:
            stopped.cancel()
            advance.cancel()
            await asyncio.wait({advance})
        if not advance.cancelled():
            advance.result()

    @property
    def _grace_left(self) -> float:
        return max(0.0, self._drain_until - time.monotonic())

    async def _advance(self) -> None:
        """One round: take what there is room for, then swap the weights when nothing holds that up."""
        self._wake.clear()
        self._room.clear()
        # What was staged before the take decides: groups that only the held version may generate are taken first.
        staged = self._stager.staged
        limit = self._limit(staged)
        if limit:
            await self._take(limit, wait_seconds=TAKE_SECONDS if staged is None else 0.0)
        self._see_to_late_groups()
        if staged is not None and staged is self._stager.staged and self._may_swap(staged.version):
            await self._swap()
        elif staged is not None:
            await self._pause(LOOK_AGAIN_SECONDS)
        elif not limit:
            await self._pause(None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Notes how a task ended that was not expected to fail."""
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self.wake()

    async def _pause(self, seconds: float | None) -> None:
        """Until a group ends, something changes, or time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._room.wait()

    # --- taking ------------------------------------------------------------------------------------------------

    def _limit(self, staged: StagedWeights | None) -> int:
        """Number of groups to take: so many that freed slots never wait for Redis."""
        if self._updater.version == 0 or self._late():
            return 0
        wanted = self._engine.slots + self._engine.slots // 4
        room = wanted - sum(len(group.requests) for group in self._groups.values())
        limit = max(0, -(-room // self._k))
        if staged is None:
            return limit
        if self._settings.weight_update == "drain":
            limit = 0
        if limit == 0 and self._asked_beyond != staged.version:
            # Once, room or no room: an evaluation of the held version may have come meanwhile.
            self._asked_beyond = staged.version
            return 1
        return limit

    async def _take(self, limit: int, *, wait_seconds: float) -> None:
        take = asyncio.create_task(
            self._streams.take(limit, held_version=self._updater.version, wait_seconds=wait_seconds)
        )
        woken = asyncio.create_task(self._wake.wait())
        await asyncio.wait({take, woken}, return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        if not take.done():
            # The streams notice a take that was cancelled, and the next one finds what it had got.
            take.cancel()
            await asyncio.gather(take, return_exceptions=True)
            if take.cancelled():
                return
        for delivery in take.result():
            await self._accept(delivery)

    async def _accept(self, delivery: Prompts) -> None:
        task = delivery.record
        try:
            requests = requests_of(
                task, run_id=self._identity.run_id, vocab_size=self._identity.vocab_size
            )
        except DataError as error:
            await self._give_up(delivery, f"malformed prompt task: {error}")
            return
        group = self._groups[delivery.key] = Group(delivery, requests)
        self._count_groups()
        if not self._is_late(group):
            self._start(group)

    def _start(self, group: Group) -> None:
        if group.range.is_late(self._updater.version):
            log.warning(
                "group %d should come from version %d at the newest; %d generates it",
                group.delivery.record.ordinal,
                group.range.newest,
                self._updater.version,
            )
        group.work = asyncio.create_task(self._run_group(group))
        group.work.add_done_callback(self._note_end)

    # --- one group ---------------------------------------------------------------------------------------------

    async def _run_group(self, group: Group) -> None:
        task = group.delivery.record
        started = now_unix_ms()
        failpoint(f"generator.ordinal_{task.ordinal}")
        try:
            async with asyncio.timeout(self._group_seconds), until(task.deadline_unix_ms):
                generated = await sample_group(self._engine, group.requests)
                await self._updater.trusted.wait()
        except TimeoutError:
            await self._give_up(
                group.delivery,
                f"the group was not done at its deadline, {now_unix_ms() - started} ms after its start "
                f"(schedule.group_deadline_seconds: {self._group_seconds:g})",
            )
        except EngineFailed:
            raise
        except EngineError as error:
            await self._give_up(group.delivery, str(error))
        else:
            rollout = rollout_of(
                task,
                generated,
                generator_id=self._identity.generator_id,
                started_unix_ms=started,
            )
            await self._hand_off(group, rollout)

    async def _hand_off(self, group: Group, rollout: samples.Rollout) -> None:
        first = await self._streams.hand_off(group.delivery, rollout)
        self._release(group.delivery)
        if not first:
            log.info("group %d was handed on by a peer already", rollout.task.ordinal)
            return
        self._counters.groups_finished += 1
        self.finished_in_drain += self._stop.is_set()
        self._counters.tokens_generated += sum(
            len(completion.token_ids) for completion in rollout.completions
        )

    async def _give_up(self, delivery: Prompts, reason: str) -> None:
        await self._streams.fail(delivery, reason, final=True)
        self._counters.groups_dead += 1
        self._release(delivery)

    def _release(self, delivery: Prompts) -> None:
        self._groups.pop(delivery.key, None)
        self._count_groups()
        self._room.set()

    def _count_groups(self) -> None:
        self._counters.groups_in_flight = len(self._groups)
        self._counters.set_waiting(not self._groups)
        self._show_activity()

    def _show_activity(self) -> None:
        busy = "generate" if self._groups else "idle"
        self._activity.enter("load" if self._swapping else busy)

    async def _cancel(self, groups: Iterable[Group]) -> None:
        works = [group.work for group in groups if group.work is not None]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    # --- weights -----------------------------------------------------------------------------------------------

    def _late(self) -> list[Group]:
        return [group for group in self._groups.values() if group.work is None]

    def _is_late(self, group: Group) -> bool:
        """Whether a group must wait for an older version than the one held."""
        newest = group.range.newest
        if group.range.evaluation and newest <= self._impatient_past:
            return False
        return group.range.is_late(self._updater.version) and not self._stager.is_gone(newest)

    def _see_to_late_groups(self) -> None:
        """Starts waiting groups that need not wait any more; asks for the version of the others."""
        for group in self._late():
            if not self._is_late(group):
                self._start(group)
        self._stager.pin(version_for_late(group.range for group in self._late()))

    def _may_swap(self, version: int) -> bool:
        running = [group.range for group in self._groups.values() if group.work is not None]
        now = time.monotonic()
        since = self._held_up_since or now
        patient = now - since < self._settings.evaluation_hold_seconds
        allowed = may_swap(version, running, evaluations_may_hold=patient)
        if self._settings.weight_update == "drain" and running:
            allowed = False
        if not allowed:
            self._held_up_since = since
        elif not patient:
            self._impatient_past = max(self._impatient_past, self._updater.version)
        return allowed

    async def _swap(self) -> None:
        if self._held_up_since is not None:
            self._counters.update_hold_seconds += time.monotonic() - self._held_up_since
            self._held_up_since = None
        self._swapping = True
        self._show_activity()
        weights = self._stager.claim()
        try:
            async with asyncio.timeout(SWAP_SECONDS):
                good = await self._updater.apply(weights)
        except TimeoutError as error:
            raise EngineFailed(
                f"version {weights.version} was not loaded and checked within {SWAP_SECONDS:g} s: the engine hangs, "
                "and this process must be started again"
            ) from error
        finally:
            self._swapping = False
            self._show_activity()
        if not good:
            await self._restart_running()
        await self._announce()
        await self._tell_health(alive=True)

    async def _restart_running(self) -> None:
        """Samples everything anew: some tokens may come from weights that failed their check."""
        running = [group for group in self._groups.values() if group.work is not None]
        await self._cancel(running)
        for group in running:
            if group.delivery.key in self._groups:
                self._start(group)

    async def _announce(self) -> None:
        info = {
            "engine": self._identity.engine,
            "version": str(self._updater.version),
            "waiting_seconds": f"{self._counters.waiting_seconds:.3f}",
            "uptime_seconds": f"{self._counters.uptime_seconds:.3f}",
            "groups_finished": str(self._counters.groups_finished),
        }
        try:
            await self._streams.announce(self._identity.address, info)
        except ServiceUnavailable as error:
            log.warning("not announced: %s", error)  # heartbeats repeat it

    # --- signs of life -----------------------------------------------------------------------------------------

    async def _beat_for_ever(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(self._beat_seconds)

    async def _beat(self) -> None:
        now = time.monotonic()
        # While a version is loaded there are no steps; the swap has a deadline of its own.
        busy = any(group.work is not None for group in self._groups.values()) and not self._swapping
        moved = self._watchdog.look(now, progress=self._engine.progress(), busy=busy)
        alive = not self._watchdog.stalled(now)
        await self._tell_health(alive=alive)
        if moved:
            await self._send_beat()
        elif self._watchdog.stalled(now, times=2.0):
            raise EngineFailed(
                f"the engine made no step for {2 * self._settings.stall_seconds:g} s with "
                f"{len(self._groups)} groups under way: it hangs, and this process must be started again"
            )
        elif not alive:
            log.error(
                "the engine made no step for generator.stall_seconds; no heartbeat until it does"
            )

    async def _send_beat(self) -> None:
        held = [group.delivery for group in self._groups.values()]
        try:
            lost = await self._streams.beat(held)
        except ServiceUnavailable as error:
            log.warning("no heartbeat: %s", error)  # `take` decides when it is time to give up
            return
        for key in lost:
            group = self._groups.pop(key, None)
            if group is not None:
                log.warning("%s %s was claimed by a peer; it is dropped here", *key)
                await self._cancel([group])
        self._count_groups()
        if self._updater.version:
            await self._announce()  # how much it did and waited, which scaling goes by

    async def _tell_health(self, *, alive: bool) -> None:
        held, wanted = self._updater.version, self._stager.announced
        self._counters.announced_version = wanted
        now = time.monotonic()
        if held >= wanted:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        late = self._behind_since is not None and now - self._behind_since > OVERDUE_SECONDS
        ready = alive and held > 0 and not late and not self._stop.is_set()
        await self._on_health(alive, ready)

    # --- the end -----------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Waits for running groups within the grace, then hands everything left back."""
        log.info("draining: %d groups under way", len(self._groups))
        await self._tell_health(alive=True)
        works = [group.work for group in self._groups.values() if group.work is not None]
        if works:
            await asyncio.wait(works, timeout=self._grace_left)
        self._raise_failure()
        left = [group.delivery for group in self._groups.values()]
        await self._cancel(self._groups.values())
        left = [delivery for delivery in left if delivery.key in self._groups]
        self.returned_in_drain = len(left)
        if not left:
            return
        log.info("handing %d groups back", len(left))
        with contextlib.suppress(TimeoutError, ServiceUnavailable):
            async with asyncio.timeout(HAND_BACK_SECONDS):
                await self._streams.hand_back(left)
        self._groups.clear()
        self._count_groups()
