"""The loop that overlays/autoscale closes: the learner's metrics, KEDA, the pool, and back. Simulated.

How the rates vary is taken from a real run in which a second generator came and went (tests/data/scaling.json, written
by tests/e2e/test_wanted.py); how large they are is the scenario's.
"""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.learner.wanted import Balance, Held, Reading, Work
from tests.deploy.manifests import KUBERNETES, of_kind, render
from tests.harness.autoscaler import Autoscaler

SERIES = Path(__file__).parents[1] / "data" / "scaling.json"
COHORT = 128
"""Groups of a step, as in the overlay's recipe."""
LOADING_SECONDS = 150.0
"""From a pod's creation to its first group: image, model, first weights."""
HOURS = 3600.0


def test_the_record_is_one_of_a_generator_that_comes_and_goes() -> None:
    readings = json.loads(SERIES.read_text())["readings"]
    present = [len(reading["workers"]) for reading in readings]
    assert [count for count, _ in itertools.groupby(present)] == [1, 2, 1]
    assert all(reading["held"] <= count for reading, count in zip(readings, present, strict=True))
    assert all(reading["wanted"] >= 1 for reading in readings)


def test_the_record_replayed_gives_the_number_that_was_told() -> None:
    """From the same series, read by somebody else at other times: to one worker or a fifth of them."""
    balance = Balance()
    differences = []
    for reading in json.loads(SERIES.read_text())["readings"]:
        workers = {name: Work(*work) for name, work in reading["workers"].items()}
        balance.add(Reading(reading["time"], Work(*reading["learner"]), workers))
        found = balance.wanted(present=len(workers), unfinished=True)
        differences.append((found - reading["wanted"]) / max(1.0, 0.2 * reading["wanted"]))
    settled = differences[len(differences) // 4 :]
    assert sorted(map(abs, settled))[int(0.9 * len(settled))] <= 1


def noise(of: str) -> list[float]:
    """How the rate while busy varied in the record, as factors around 1: the learner by step, the workers by 5 s."""
    record = json.loads(SERIES.read_text())
    if of == "learner":
        rates = [1 / seconds for seconds in record["work_seconds"]]
    else:
        rates = []
        readings = record["readings"]
        for first, last in list(zip(readings, readings[10:], strict=False))[::10]:
            names = first["workers"].keys() & last["workers"].keys()
            pairs = [(first["workers"][name], last["workers"][name]) for name in names]
            busy = sum(b[0] - a[0] for a, b in pairs)
            groups = sum(b[1] - a[1] for a, b in pairs)
            if busy > 0 and groups > 0:
                rates.append(groups / busy)
    mean = sum(rates) / len(rates)
    return [rate / mean for rate in rates]


@dataclass
class Pod:
    """A worker: from when on it works, and what it did since its start."""

    ready_at: float
    busy: float = 0.0
    groups: float = 0.0


@dataclass
class World:
    """A learner that would use up `demand` groups a second, and a pool of workers that make `supply(time)` each.

    Cohorts are issued as the learner does with max_lag 1: two ahead of the step that is done.
    """

    demand: float
    supply: Callable[[float], float]
    scaler: Autoscaler
    now: float = 0.0
    pods: dict[str, Pod] = field(default_factory=dict)
    busy: float = 0.0
    steps: int = 0
    made: float = 0.0
    left: float = 0.0
    """Groups of the step under way that the learner has not used up; 0: it waits for a cohort."""
    replicas: list[tuple[float, int]] = field(default_factory=list)
    wanted: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._names = (f"pod-{number}" for number in itertools.count())
        self._noise = {of: itertools.cycle(noise(of)) for of in ("learner", "workers")}
        self._balance, self._held = Balance(), Held()
        self._scale(self.scaler.replicas)
        for pod in self.pods.values():
            pod.ready_at = 0.0

    def run(self, seconds: float, *, finished_at: float = math.inf, tick: float = 1.0) -> None:
        """Lets time pass."""
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            finished = self.now >= finished_at
            self._generate(tick, idle=finished)
            self._learn(tick, idle=finished)
            wanted = self._balance.wanted(present=len(self._working()), unfinished=not finished)
            if self.now % self.scaler.period < tick:
                values = {"wanted": float(wanted), "held": float(self._held.workers)}
                self._scale(self.scaler.decide(self.now, values))
            self.replicas.append((self.now, len(self.pods)))
            self.wanted.append((self.now, wanted))

    def preempt(self, count: int) -> None:
        """Takes pods away at once; their Deployment makes new ones, which have to load."""
        for name in list(self.pods)[:count]:
            del self.pods[name]
        self._scale(self.scaler.replicas)

    def _working(self) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.ready_at <= self.now]

    def _generate(self, tick: float, *, idle: bool) -> None:
        working = self._working()
        pending = 0.0 if idle else (self.steps + 2) * COHORT - self.made
        supply = self.supply(self.now) * next(self._noise["workers"])
        made = min(pending, supply * len(working) * tick)
        self.made += made
        for pod in working:
            pod.groups += made / len(working)
            pod.busy += made / len(working) / supply
        # Each has its fair share, in whole groups.
        share, more = divmod(math.ceil(pending - made), max(1, len(working)))
        self._held.add(self.now, [share + (place < more) for place in range(len(working))])

    def _learn(self, tick: float, *, idle: bool) -> None:
        if not self.left and not idle and self.made >= (self.steps + 1) * COHORT:
            self.left = COHORT
        if not self.left:
            return
        demand = self.demand * next(self._noise["learner"])
        used = min(self.left, demand * tick)
        self.busy += used / demand
        self.left -= used
        if not self.left:
            self.steps += 1
            workers = {
                name: Work(pod.busy, pod.groups)
                for name, pod in self.pods.items()
                if pod.ready_at <= self.now
            }
            learner = Work(self.busy, float(self.steps * COHORT))
            self._balance.add(Reading(self.now, learner, workers))

    def _scale(self, replicas: int) -> None:
        while len(self.pods) > replicas:  # the newest go first
            self.pods.popitem()
        while len(self.pods) < replicas:
            self.pods[next(self._names)] = Pod(self.now + LOADING_SECONDS)


def scaler(name: str = "generator", *, replicas: int) -> Autoscaler:
    manifests = render(KUBERNETES / "overlays" / "autoscale")
    objects = of_kind(manifests, "ScaledObject")
    return Autoscaler(
        next(scaled for scaled in objects if scaled["metadata"]["name"] == name), replicas=replicas
    )


def turns(replicas: list[tuple[float, int]]) -> int:
    """How often it changed its direction."""
    counts = [count for count, _ in itertools.groupby(count for _, count in replicas)]
    moves = [later - earlier for earlier, later in itertools.pairwise(counts)]
    return sum(first * second < 0 for first, second in itertools.pairwise(moves))


def serves(count: int, share: float) -> bool:
    """Whether so many serve a demand of `share` workers, and not many more than needed: within the tolerances."""
    return share * 0.85 <= count <= math.ceil(share * 1.15) + 1


@pytest.mark.parametrize("start", [1, 4, 20])
@pytest.mark.parametrize(
    ("pool", "share"), [("slow", 7.4), ("slower", 15.3), ("even", 1.0), ("fast", 0.3)]
)
def test_it_settles_at_the_balanced_number(pool: str, share: float, start: int) -> None:
    world = World(4.0, lambda now: 4.0 / share, scaler(replicas=start))
    world.run(4 * HOURS)
    last = world.replicas[-3600:]
    assert turns(world.replicas) <= 1, "it oscillates"
    assert len({count for _, count in last}) == 1, "it does not settle"
    assert serves(last[0][1], share), (last[0][1], share)
    assert min(count for _, count in world.replicas) >= 1


def test_a_pool_that_changes_is_followed_and_left_in_peace() -> None:
    """Answers get three times as long in the second hour, and shorter again in the fifth."""

    def supply(now: float) -> float:
        return 0.4 if 2 * HOURS < now < 5 * HOURS else 1.2

    world = World(4.0, supply, scaler(replicas=2))
    found = []
    for hours in (2, 3, 3):
        before = len(world.replicas)
        world.run(hours * HOURS)
        part = world.replicas[before:]
        assert turns(part) <= 1
        found.append(part[-1][1])
    assert serves(found[0], 4.0 / 1.2), found
    assert serves(found[1], 4.0 / 0.4), found
    assert serves(found[2], 4.0 / 1.2), found


def test_preemptions_do_not_move_the_number() -> None:
    world = World(4.0, lambda now: 0.7, scaler(replicas=6))
    world.run(2 * HOURS)
    settled = world.scaler.replicas
    for _ in range(6):
        world.preempt(3)
        world.run(0.5 * HOURS)
    assert abs(world.scaler.replicas - settled) <= 1
    assert turns(world.replicas) <= 1


def test_nobody_goes_while_what_is_pending_fills_them_all() -> None:
    """The demand falls to almost nothing, and the pool is still full of long answers: held keeps it."""
    auto = scaler(replicas=6)
    for now in range(0, 3600, 15):
        assert auto.decide(float(now), {"wanted": 1.0, "held": 6.0}) == 6
    for now in range(3600, 3600 + 600, 15):
        assert auto.decide(float(now), {"wanted": 1.0, "held": 0.0}) >= 5, (
            "before the window is over"
        )
    counts = [
        auto.decide(float(now), {"wanted": 1.0, "held": 0.0}) for now in range(4200, 9000, 15)
    ]
    assert counts[-1] == 1
    assert max(a - b for a, b in itertools.pairwise(counts)) == 1, "one at a time"


@pytest.mark.parametrize("name", ["generator", "reward"])
def test_never_nobody_even_when_the_run_is_over(name: str) -> None:
    world = World(4.0, lambda now: 1.0, scaler(name, replicas=3))
    world.run(6 * HOURS, finished_at=2 * HOURS)
    assert world.wanted[-1][1] == 0
    assert min(count for _, count in world.replicas) == 1
    pending = [count for (now, count) in world.replicas if now < 2 * HOURS]
    assert min(pending) >= 1


def test_without_the_windows_it_would_swing() -> None:
    """What the check above would find: a loop that goes by the backlog, as one is tempted to."""
    auto = scaler(replicas=4)
    auto._up = {**auto._up, "stabilizationWindowSeconds": 0}
    auto._down = {**auto._down, "stabilizationWindowSeconds": 0}
    auto._down["policies"] = [{"type": "Percent", "value": 100, "periodSeconds": 15}]
    seen = []
    for turn in range(40):
        backlog = (
            12.0 if turn % 8 < 4 else 1.0
        )  # fills while new ones load, is emptied when they come
        seen.append((15.0 * turn, auto.decide(15.0 * turn, {"wanted": backlog, "held": 0.0})))
    assert turns(seen) > 3
