"""Whatever workers and learners do, in any order: nothing is lost, nothing goes on twice, on every adapter.

A step may be a take, heartbeat, hand-off, hand-back, failure, death, claim after an idle time, settling, retirement,
or a new term. After each step every attempt that was issued and not settled lies on exactly one stream; at the end
all of it is driven to the learner.
"""

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from offbeat.local.redis_server import RedisServer
from offbeat.streams.base import Delivery, LearnerStreams, Stream, WorkerStreams
from offbeat.streams.memory import MemoryServer
from tests.harness.streams import StreamsRun, make_result, make_task, ordinals

Attempt = tuple[int, int]
SLOTS = ("generator", "generator", "reward", "reward")

slots = st.integers(0, len(SLOTS) - 1)


def attempt_of(delivery: Delivery) -> Attempt:
    record = delivery.record
    told = record
    while hasattr(told, "rollout") or hasattr(told, "task"):
        told = told.rollout if hasattr(told, "rollout") else told.task
    return told.ordinal, told.attempt


class Streams(RuleBasedStateMachine):
    """The run, and a model of it: which attempts are under way."""

    server: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.run = StreamsRun(self.server or MemoryServer())
        self.term = 1
        self.learner: LearnerStreams = self.do(self.run.learner(1))
        self.workers: list[WorkerStreams] = [self.run.worker(role) for role in SLOTS]
        self.holding: list[list[Delivery]] = [[] for _ in SLOTS]
        self.zombies: list[tuple[WorkerStreams, list[Delivery]]] = []
        self.collected: list[Delivery] = []
        self.under_way: set[Attempt] = set()
        self.forwarded: Counter[tuple[Stream, Attempt]] = Counter()
        self.issued = 0

    def do(self, coroutine):
        return self.loop.run(coroutine)

    # --- the learner -------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4))
    def issue(self, count: int) -> None:
        tasks = [make_task(self.issued + i, term=self.term) for i in range(count)]
        assert self.do(self.learner.issue(tasks)) == count
        assert self.do(self.learner.issue(tasks)) == 0
        self.issued += count
        self.under_way |= {(task.ordinal, 0) for task in tasks}

    @rule(limit=st.integers(1, 5))
    def collect(self, limit: int) -> None:
        found = self.do(self.learner.collect(limit=limit, wait_seconds=0.0))
        known = {delivery.key for delivery in self.collected}
        assert not known & {delivery.key for delivery in found}
        self.collected += found

    @rule(count=st.integers(1, 3))
    def settle(self, count: int) -> None:
        done, self.collected = self.collected[:count], self.collected[count:]
        self.do(self.learner.settle(done, ordinals(done)))
        self.under_way -= {attempt_of(delivery) for delivery in done}

    @rule()
    def retire(self) -> None:
        groups = [d for d in self.collected if d.stream is Stream.SCORED]
        if groups:
            self.collected.remove(groups[0])
            ordinal, attempt = attempt_of(groups[0])
            again = make_task(ordinal, attempt=attempt + 1, term=self.term)
            self.do(self.learner.retire(groups[0], again))
            self.under_way.discard((ordinal, attempt))
            self.under_way.add((ordinal, attempt + 1))

    @rule()
    def new_term(self) -> None:
        self.term += 1
        self.learner = self.do(self.run.learner(self.term))
        self.collected = []

    # --- the workers -------------------------------------------------------------------------------------------

    @rule(slot=slots, limit=st.integers(1, 4))
    def take(self, slot: int, limit: int) -> None:
        worker, held = self.workers[slot], self.holding[slot]
        found = self.do(worker.take(limit, wait_seconds=0.0))
        assert len(found) <= limit
        assert not {d.key for d in held} & {d.key for d in found}
        held += found
        if any(delivery.alone for delivery in held):
            assert len(held) == 1

    @rule(slot=slots, limit=st.integers(1, 4))
    def work(self, slot: int, limit: int) -> None:
        """What most of a run is: without it, few entries would get far."""
        self.take(slot, limit)
        while self.holding[slot]:
            self.hand_off(slot)

    @rule(slots=st.permutations([0, 2]))
    def work_on_both_sides(self, slots: list[int]) -> None:
        for slot in slots:
            self.work(slot, 4)
        self.collect(5)

    @rule(slot=slots)
    def hand_off(self, slot: int) -> None:
        if self.holding[slot]:
            self._hand_off(self.workers[slot], self.holding[slot].pop(0))

    def _hand_off(self, worker: WorkerStreams, delivery: Delivery) -> None:
        if self.do(worker.hand_off(delivery, make_result(delivery))):
            moved = delivery.stream, attempt_of(delivery)
            self.forwarded[moved] += 1
            assert self.forwarded[moved] == 1

    @rule(slot=slots)
    def beat(self, slot: int) -> None:
        lost = self.do(self.workers[slot].beat(self.holding[slot]))
        self.holding[slot] = [d for d in self.holding[slot] if d.key not in lost]

    @rule(slot=slots)
    def hand_back(self, slot: int) -> None:
        held, self.holding[slot] = self.holding[slot], []
        self.do(self.workers[slot].hand_back(held))

    @rule(slot=slots, final=st.booleans())
    def fail(self, slot: int, final: bool) -> None:
        if self.holding[slot]:
            delivery = self.holding[slot].pop(0)
            self.do(self.workers[slot].fail(delivery, "failed", final=final))

    @rule(slot=slots, limit=st.integers(1, 2))
    def kill_again_and_again(self, slot: int, limit: int) -> None:
        for _ in range(2):
            self.take(slot, limit)
            self.die(slot)
            self.idle()

    @rule(slot=slots)
    def die(self, slot: int) -> None:
        self.zombies.append((self.workers[slot], self.holding[slot]))
        self.workers[slot], self.holding[slot] = self.run.worker(SLOTS[slot]), []

    @rule()
    def a_zombie_wakes(self) -> None:
        if self.zombies:
            worker, held = self.zombies.pop(0)
            for delivery in held:
                self._hand_off(worker, delivery)

    @rule()
    def idle(self) -> None:
        self.do(self.run.idle())

    # --- what always holds -------------------------------------------------------------------------------------

    @invariant()
    def every_attempt_is_in_one_place(self) -> None:
        self.do(self._check())

    async def _check(self) -> None:
        places: Counter[Attempt] = Counter()
        for stream in (Stream.PROMPTS, Stream.ROLLOUTS, Stream.SCORED):
            places.update(await self.run.attempts(stream))
        dead = await self.run.attempts(Stream.DEAD)
        assert len(set(dead)) == len(dead)
        assert not set(dead) & set(places)
        places.update(attempt for attempt in dead if attempt in self.under_way)
        assert places == Counter(self.under_way)
        assert set(await self.learner.in_flight()) == {ordinal for ordinal, _ in self.under_way}

    def teardown(self) -> None:
        try:
            for slot in range(len(SLOTS)):
                self.hand_back(slot)
            self.new_term()
            for _ in range(200):
                if not self.under_way:
                    break
                self.idle()
                for slot in range(len(SLOTS)):
                    self.work(slot, 4)
                self.collect(100)
                self.settle(100)
            assert not self.under_way
            self.every_attempt_is_in_one_place()
            self.do(self.run.close())
        finally:
            self.loop.close()


def check(server: str | None, examples: int, steps: int) -> None:
    class OnServer(Streams):
        pass

    OnServer.server = server
    run_state_machine_as_test(
        OnServer,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # shrinking would take minutes on a server
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_nothing_is_lost_or_doubled_in_memory() -> None:
    check(None, examples=20, steps=50)


def test_nothing_is_lost_or_doubled_on_a_server(
    request: pytest.FixtureRequest, own_server: RedisServer
) -> None:
    check(own_server.url, examples=5, steps=50)
