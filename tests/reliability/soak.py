"""`make soak`: faults at random for as long as wanted, one after the other with calm between them.

Passes when the audit is clean, no service is shown to grow, and the run outside of recovery is as fast as without
faults. The first and the last part of the time are without faults: what the run is compared with.
"""

import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.harness import faults as known
from tests.harness.faulted_run import ROLES, FaultedRun, faulted_run
from tests.harness.faults import Fault
from tests.harness.whole_run import resume
from tests.reliability.campaign import (
    LAST_STEPS,
    RECOVERY_SECONDS,
    Found,
    Struck,
    count,
    holds,
    server_version,
)
from tests.reliability.memory import Memory

SECTIONS = {
    "schedule": {"max_lag": 1},
    # Time per token rather than work: what else runs on the machine then matters less.
    "generator": {
        "replicas": 3,
        "engine": {"name": "deterministic", "min_tokens": 2, "token_seconds": 0.05},
    },
    "reward": {"replicas": 3, "max_groups": 4},
}
WEIGHTS: dict[Fault, float] = {
    known.GENERATOR_KILL: 6,
    known.REWARD_KILL: 6,
    known.LEARNER_KILL: 0.5,
    known.CHECKPOINT_KILL: 1,
    known.REDIS_KILL: 2,
    known.REDIS_EMPTIED: 1,
    known.REDIS_FULL: 1,
    known.DISK_FULL: 1,
    **dict.fromkeys(known.FROZEN, 1.0),
    **dict.fromkeys(known.LEARNER_POINTS, 0.1),
    **dict.fromkeys(known.CHECKPOINT_POINTS, 0.25),
    **dict.fromkeys((*known.REDIS_NETWORK, *known.WEIGHTS_NETWORK), 0.5),
}
CALM_SECONDS = (5.0, 15.0)
"""Between two faults."""
WINDOW_SECONDS = 5.0
AFTERMATH_SECONDS = 2.0
"""Time after a recovery that is not calm yet: the pipeline fills again."""
QUIET_SHARE = 0.15
"""Share of the time at each end that is without faults."""
SAMPLE_SECONDS = 2.0
WARM_UP_SHARE = 0.15
"""Share of the time in which a process's growth does not count: its allocator still fills."""
MOST_GROWTH = (0.05, 10.0)
"""Share of its size, and MiB, in an hour: a service that is shown to grow by more than both fails."""
SLOWER = 0.10
NOTE = (
    "the oldest worker of each kind is never killed, and a process's first minutes are left out. A service that is "
    f"shown to grow by more than {100 * MOST_GROWTH[0]:g} % of its size and by more than {MOST_GROWTH[1]:g} MiB in an "
    "hour would have failed the soak."
)


@dataclass
class Soaked(Found):
    """What a soak found."""

    minutes: float = 0.0
    window_seconds: float = WINDOW_SECONDS
    baseline_steps_per_second: float = 0.0
    baseline_windows: int = 0
    calm_steps_per_second: float = 0.0
    calm_windows: int = 0
    calm_share: float = 0.0
    """Share of the time with faults that was outside of recovery."""
    memory: dict[str, object] = field(default_factory=dict)
    note: str = NOTE


class Soak:
    """One soak over a running run."""

    def __init__(
        self, run: FaultedRun, chance: random.Random, say: Callable[[str], None], minutes: float
    ) -> None:
        self._run = run
        self._chance = chance
        self._say = say
        self.memory = Memory(warm_up_seconds=max(60.0, 60 * minutes * WARM_UP_SHARE))
        self.struck: list[Struck] = []
        self.troubled: list[tuple[float, float]] = []
        """Times from a fault to the end of its aftermath, seconds since 1970."""
        self._sampled = 0.0

    def quiet(self, seconds: float) -> tuple[float, float]:
        """Lets the run go on; returns when that began and ended."""
        began = time.time()
        self._until(lambda: time.time() - began >= seconds)
        return began, time.time()

    def faults(self, seconds: float) -> tuple[float, float]:
        """Strikes for so long; returns when that began and ended."""
        began = time.time()
        while time.time() - began < seconds:
            self.quiet(self._chance.uniform(*CALM_SECONDS))
            fault = self._chance.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
            struck = time.time()
            recovered = fault.strike(self._run, self._chance)
            self._until(lambda recovered=recovered: holds(recovered))
            took = time.time() - struck
            self.struck.append(Struck(fault.kind, fault.target, took, struck - began))
            self.troubled.append((struck, time.time() + AFTERMATH_SECONDS))
            self._say(f"{len(self.struck)} {fault.kind}: {took:.1f} s, step {self._run.step()}")
        return began, time.time()

    def _until(self, over: Callable[[], bool]) -> None:
        end = time.monotonic() + max(RECOVERY_SECONDS, 3600.0)
        while not over():
            self._run.poll()
            if time.monotonic() - self._sampled > SAMPLE_SECONDS:
                self.memory.sample(self._run)
                self._sampled = time.monotonic()
            assert time.monotonic() < end, f"not over it:\n{self._run.output()}"
            time.sleep(0.05)

    def rates(self, began: float, ended: float) -> list[float]:
        """Steps per second in each window of that time that touches no trouble."""
        done = [line["time"] for line in self._run.steps]
        return [
            sum(start <= at < start + WINDOW_SECONDS for at in done) / WINDOW_SECONDS
            for start in windows(began, ended, self.troubled)
        ]


def windows(began: float, ended: float, troubled: list[tuple[float, float]]) -> Iterator[float]:
    """Starts of the windows, one after the other, that lie between troubles."""
    start = began
    while start + WINDOW_SECONDS <= ended:
        inside = [to for frm, to in troubled if frm < start + WINDOW_SECONDS and to > start]
        if inside:
            start = max(inside)
        else:
            yield start
            start += WINDOW_SECONDS


def soak(folder: Path, seed: int, minutes: float, say: Callable[[str], None]) -> Soaked:
    """Runs a soak, writes what it found to soak.json, and raises AssertionError when it did not pass."""
    chance = random.Random(f"{seed}:soak")
    scratch = folder / "soak"
    shutil.rmtree(scratch, ignore_errors=True)
    found = Soaked("soak", seed, "", SECTIONS, max_lag=1, minutes=minutes)
    began = time.monotonic()
    with faulted_run(scratch, **SECTIONS) as run:
        run.wait_until(lambda: run.step() >= 20, "step 20")
        run.wait_until(lambda: all(run.all_work(role) for role in ROLES), "all workers")
        run.spared = {min(run.pids(role)) for role in ROLES}
        found.server = server_version(run)
        work = Soak(run, chance, say, minutes)
        quiet_seconds = 60 * minutes * QUIET_SHARE
        quiet = [work.quiet(quiet_seconds)]
        faulted = work.faults(60 * minutes * (1 - 2 * QUIET_SHARE))
        quiet.append(work.quiet(quiet_seconds))
        _measure(found, work, quiet, faulted)
        last = run.step() + LAST_STEPS
        run.kill_all()
        with resume(run.recipe, run.folder, f"schedule.steps={last}") as resumed:
            resumed.succeed()
            audit = resumed.audit()
        count(found, run.folder, audit.as_dict(), cohort=16)
    found.seconds = time.monotonic() - began
    (folder / "soak.json").write_text(json.dumps(asdict(found), indent=1))
    shutil.rmtree(scratch)
    _check(found, work)
    return found


def _measure(
    found: Soaked,
    work: Soak,
    quiet: list[tuple[float, float]],
    faulted: tuple[float, float],
) -> None:
    baseline = [rate for began, ended in quiet for rate in work.rates(began, ended)]
    calm = work.rates(*faulted)
    found.faults = work.struck
    found.baseline_windows, found.calm_windows = len(baseline), len(calm)
    # Means: a window holds so few steps that a median would be one of a handful of values.
    found.baseline_steps_per_second = statistics.fmean(baseline)
    found.calm_steps_per_second = statistics.fmean(calm)
    trouble = sum(fault.seconds for fault in work.struck)
    found.calm_share = 1 - trouble / (faulted[1] - faulted[0])
    found.memory = {name: asdict(growth) for name, growth in work.memory.growth().items()}


def _check(found: Soaked, work: Soak) -> None:
    found.check()
    growing = [name for name, growth in work.memory.growth().items() if growth.shown(*MOST_GROWTH)]
    assert not growing, f"{growing} grow: {found.memory}"
    floor = (1 - SLOWER) * found.baseline_steps_per_second
    assert found.calm_steps_per_second >= floor, (
        f"{found.calm_steps_per_second:.2f} steps/s outside of recovery, "
        f"{found.baseline_steps_per_second:.2f} without faults"
    )
