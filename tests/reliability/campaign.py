"""`make reliability`: a few runs, hundreds of faults, and the pass conditions as assertions.

A campaign is a list of rounds. A round is one run with settings of its own, through which its share of the faults is
drawn in random order, up to three of them under way at once. When all are over, the command itself is killed and the
run resumed to its end. What a round found is a file in the campaign's folder: a campaign that was interrupted goes on
with the rounds that it lacks.
"""

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis

from tests.harness import faults as known
from tests.harness.faulted_run import FaultedRun, faulted_run
from tests.harness.faults import Fault, Recovered
from tests.harness.whole_run import resume
from tests.reliability.checks import stale_writes, torn_completions
from tests.reliability.stale import POINTS, Overtaken, overtake

AT_ONCE = 3
"""Faults that may be under way together."""
PAUSE_SECONDS = 1.0
"""Longest time between two."""
REST_SECONDS = 4.0
"""Longest time from a recovery to the next fault of the same target."""
RECOVERY_SECONDS = 300.0
"""A run that has not got over a fault by then never will."""
LAST_STEPS = 10
"""Steps that the resumed run trains."""


@dataclass(frozen=True)
class Round:
    """One run of a campaign."""

    name: str
    server: str
    """The Redis: "valkey" (embedded) or "redis" (redis-server on PATH)."""
    sections: dict[str, Any]
    counts: dict[Fault, int]


@dataclass
class Struck:
    """A fault that the run got over."""

    kind: str
    target: str
    seconds: float
    """From the fault to the recovery."""
    at: float
    """Since the start of the round."""


def commit() -> str:
    """The commit that is tried."""
    folder = Path(__file__).parent
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


@dataclass
class Found:
    """What a round found."""

    name: str
    seed: int
    server: str
    sections: dict[str, Any]
    max_lag: int
    steps: int = 0
    seconds: float = 0.0
    faults: list[Struck] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)
    missing: int = 0
    trained_twice: int = 0
    lag_above_bound: int = 0
    completions: int = 0
    torn: int = 0
    stale: int = 0
    commit: str = field(default_factory=commit)

    def check(self) -> None:
        """Raises AssertionError when a promise was broken."""
        broken = ("missing", "trained_twice", "lag_above_bound", "torn", "stale")
        counted = {name: getattr(self, name) for name in broken}
        assert not any(counted.values()), counted
        assert self.audit["problems"] == [], self.audit["problems"]
        assert self.completions > 0, "no completion could be compared with its weights"


def rounds(share: float = 1.0) -> list[Round]:
    """The campaign. `share` makes it smaller; every kind of fault stays."""

    def counts(**each: int) -> dict[Fault, int]:
        found = {
            known.GENERATOR_KILL: each["generator"],
            known.REWARD_KILL: each["reward"],
            known.LEARNER_KILL: each["learner"],
            known.CHECKPOINT_KILL: 3,
            known.REDIS_KILL: each["redis"],
            known.REDIS_EMPTIED: 1,
            known.REDIS_FULL: 1,
            known.DISK_FULL: 1,
        }
        found |= dict.fromkeys(known.FROZEN, 1)
        found |= dict.fromkeys(known.LEARNER_POINTS, 1)
        found |= dict.fromkeys(known.CHECKPOINT_POINTS, 1)
        found |= dict.fromkeys((*known.REDIS_NETWORK, *known.WEIGHTS_NETWORK), 1)
        return {fault: max(1, round(count * share)) for fault, count in found.items()}

    third = {"generator": 17, "reward": 17, "learner": 7, "redis": 4}
    return [
        Round("at_most_1", "valkey", {"schedule": {"max_lag": 1}}, counts(**third)),
        Round(
            "exact_1", "redis", {"schedule": {"max_lag": 1, "lag_mode": "exact"}}, counts(**third)
        ),
        Round("at_most_3", "valkey", {"schedule": {"max_lag": 3}}, counts(**third)),
    ]


def play(part: Round, folder: Path, seed: int, say: Callable[[str], None]) -> Found:
    """Plays one round. Raises AssertionError when the run does not get over a fault, or a promise was broken."""
    chance = random.Random(f"{seed}:{part.name}")
    plan = [fault for fault, count in part.counts.items() for _ in range(count)]
    chance.shuffle(plan)
    binary = None if part.server == "valkey" else shutil.which("redis-server")
    max_lag = part.sections["schedule"]["max_lag"]
    found = Found(part.name, seed, part.server, part.sections, max_lag)
    began = time.monotonic()
    with faulted_run(folder, redis_binary=binary, **part.sections) as run:
        run.wait_until(lambda: run.step() >= 3, "step 3")
        found.server = server_version(run)
        found.faults = strike_all(run, plan, chance, say)
        last = run.step() + LAST_STEPS
        run.kill_all()
        with resume(run.recipe, run.folder, f"schedule.steps={last}") as resumed:
            resumed.succeed()
            audit = resumed.audit()
        count(found, run.folder, audit.as_dict(), cohort=16)
    found.seconds = time.monotonic() - began
    found.check()
    return found


def server_version(run: FaultedRun) -> str:
    """Name and version of the Redis under the run."""
    info = run.client.info("server")
    name = "Valkey" if "valkey_version" in info else "Redis"
    return f"{name} {info.get('valkey_version', info['redis_version'])}"


def strike_all(
    run: FaultedRun, plan: Sequence[Fault], chance: random.Random, say: Callable[[str], None]
) -> list[Struck]:
    """Strikes with all faults of the plan and waits until the run got over each."""
    waiting, under_way, over = list(plan), list[tuple[Fault, float, Recovered]](), list[Struck]()
    began, next_at, rested_at = time.monotonic(), 0.0, dict[str, float]()
    while waiting or under_way:
        run.poll()
        for item in list(under_way):
            fault, at, recovered = item
            seconds = time.monotonic() - at
            if holds(recovered):
                under_way.remove(item)
                rested_at[fault.target] = time.monotonic() + chance.uniform(0.0, REST_SECONDS)
                over.append(Struck(fault.kind, fault.target, seconds, at - began))
                say(f"{len(over)}/{len(plan)} {fault.kind}: {seconds:.1f} s, step {run.step()}")
            else:
                assert seconds < RECOVERY_SECONDS, f"{fault}: not over it\n{run.output()}"
        busy = {fault.target for fault, _, _ in under_way}
        busy |= {target for target, at in rested_at.items() if at > time.monotonic()}
        possible = [fault for fault in waiting if fault.target not in busy]
        if possible and len(under_way) < AT_ONCE and time.monotonic() >= next_at:
            fault = possible[0]
            waiting.remove(fault)
            under_way.append((fault, time.monotonic(), fault.strike(run, chance)))
            next_at = time.monotonic() + chance.uniform(0.0, PAUSE_SECONDS)
        time.sleep(0.05)
    return over


def holds(recovered: Recovered) -> bool:
    """What can't be asked because Redis is away does not hold yet."""
    try:
        return recovered()
    except redis.RedisError:
        return False


def count(found: Found, run_folder: Path, audit: dict[str, Any], *, cohort: int) -> None:
    """Counts what must be 0."""
    found.audit, found.steps = audit, audit["steps"]
    outcomes = audit["trained"] + audit["filtered"] + audit["dead"]
    found.missing = found.steps * cohort - audit["ordinals"]
    found.trained_twice = outcomes - audit["ordinals"]
    found.lag_above_bound = sum(n for lag, n in audit["lag_counts"].items() if lag > found.max_lag)
    found.completions, found.torn = torn_completions(run_folder)
    found.stale = stale_writes(run_folder)


def campaign(folder: Path, seed: int, share: float, say: Callable[[str], None]) -> None:
    """Plays what has no result in the folder yet; each part leaves a file there."""
    for part in rounds(share):
        say(f"round {part.name}: {sum(part.counts.values())} faults")
        _once(folder, part.name, partial(_play, part, seed=seed, say=say))
    say(f"round stale: {len(POINTS)} learners are overtaken")
    _once(folder, "stale", partial(_overtaken, seed=seed))


def _play(part: Round, scratch: Path, *, seed: int, say: Callable[[str], None]) -> Found:
    return play(part, scratch, seed, lambda text: say(f"{part.name} {text}"))


def _overtaken(scratch: Path, *, seed: int) -> Overtaken:
    found = overtake(scratch, seed)
    assert found.stale == 0, found
    return found


def _once(folder: Path, name: str, work: Callable[[Path], Any]) -> None:
    """Does the work unless its result is there."""
    file = folder / f"{name}.json"
    if file.exists():
        return
    scratch = folder / name
    shutil.rmtree(scratch, ignore_errors=True)
    found = work(scratch)
    file.write_text(json.dumps(asdict(found), indent=1))
    shutil.rmtree(scratch)
