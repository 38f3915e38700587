"""Learners that were frozen, were overtaken, and wake beside their successor (W4). Used by a test and the campaign."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from offbeat.failpoints import VARIABLE
from tests.harness.services import COHORT, Services
from tests.harness.whole_run import WAIT_SECONDS
from tests.reliability.checks import stale_writes

POINTS = (
    "",
    "publish.sending",
    "learner.published",
    "checkpoint.before_rename",
    "checkpoint.before_committed",
)
"""Where a learner is frozen; "": wherever it is."""
EXIT_FENCED = 2


@dataclass
class Overtaken:
    """What came of a run whose learners were overtaken."""

    learners: int
    """That were frozen and woken."""
    stale: int
    """Versions of theirs that were accepted afterwards."""
    seconds: list[float]
    """From the start of each successor to its first step."""


def overtake(folder: Path, seed: int, points: tuple[str, ...] = POINTS) -> Overtaken:
    """Freezes the learner at each point, lets a second one take over, wakes the first; then the run goes to its end.

    Raises AssertionError when a learner that was overtaken goes on, or the audit is not clean.
    """
    chance = random.Random(f"{seed}:stale")
    armed = folder / "failpoints"
    armed.mkdir(parents=True)
    environment = {VARIABLE: ",".join(f"{point}=stop@{armed / point}" for point in points if point)}
    sections = {"schedule": {"steps": 10_000}, "learner": {"checkpoints": {"every_steps": 2}}}
    seconds = []
    with Services(folder, **sections) as run:
        for name in ("redis", "checkpoint", "generator", "reward"):
            run.start(name)
        learner = run.start("learner", environment)
        for term, point in enumerate(points, start=1):
            run.wait_for(lambda term=term: _steps_of(run, term) >= 3, f"steps of term {term}")
            _freeze(run, learner.pid, armed / point if point else None, chance)
            began, successor = time.monotonic(), run.start("learner", environment)
            run.wait_for(
                lambda term=term: _steps_of(run, term + 1) >= 1, f"a step of term {term + 1}"
            )
            seconds.append(time.monotonic() - began)
            os.kill(learner.pid, signal.SIGCONT)
            assert learner.wait(WAIT_SECONDS) == EXIT_FENCED, run.output()
            learner = successor
        last = len(points) + 1
        run.wait_for(lambda: _steps_of(run, last) >= 5, f"steps of term {last}")
        learner.terminate()
        assert learner.wait(120) == 143, run.output()
        audit = run.audit(max_lag=1)
        assert audit.trained == audit.steps * COHORT
        return Overtaken(len(points), stale_writes(run.folder), seconds)


def _steps_of(run: Services, term: int) -> int:
    return sum(line["term"] == term for line in run.steps())


def _freeze(run: Services, pid: int, file: Path | None, chance: random.Random) -> None:
    if file is None:
        time.sleep(chance.uniform(0.0, 1.0))
        os.kill(pid, signal.SIGSTOP)
        return
    file.touch()
    run.wait_for(lambda: not file.exists(), f"the learner to freeze at {file.name}")
