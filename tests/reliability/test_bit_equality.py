"""The same seed with and without faults (E1): the same samples in the same order; with a fixed lag, the same bits."""

import random
from pathlib import Path

import pytest

from offbeat.checkpoints import Checkpoints
from offbeat.ledger import read_ledger
from tests.harness import faults as known
from tests.harness.faulted_run import FaultedRun, faulted_run
from tests.harness.whole_run import resume, start
from tests.reliability.campaign import holds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PLAN = (
    known.GENERATOR_KILL,
    known.LEARNER_KILL,
    known.REWARD_KILL,
    *known.FROZEN,
    known.LEARNER_POINTS[0],
    known.REDIS_KILL,
    known.REDIS_NETWORK[2],
    known.LEARNER_POINTS[3],
    known.CHECKPOINT_KILL,
    known.WEIGHTS_NETWORK[2],
    known.REDIS_EMPTIED,
    known.LEARNER_KILL,
)
LAST_STEPS = 5


def strike_in_turn(run: FaultedRun, seed: int) -> int:
    """All faults of the plan, each once the run got over the one before; returns a step to end with."""
    chance = random.Random(seed)
    run.wait_until(lambda: run.step() >= 3, "step 3")
    for fault in PLAN:
        seen = len(run.steps)
        run.wait_until(lambda seen=seen: len(run.steps) > seen, "a step in calm")
        recovered = fault.strike(run, chance)
        run.wait_until(lambda recovered=recovered: holds(recovered), fault.passes)
    last = run.step() + LAST_STEPS
    run.kill_all()
    return last


def state(folder: Path) -> dict[str, bytes]:
    """The trainer's whole state at the end: weights, master weights, optimizer."""
    newest = Checkpoints(folder, keep=1).committed()[-1]
    files = {file.name: file.read_bytes() for file in newest.path.glob("*.safetensors")}
    assert files
    return files | {"export": (folder / "export" / "model.safetensors").read_bytes()}


def trained(folder: Path) -> list[list[int]]:
    """Ordinals by step, as the weights saw them last."""
    steps: dict[int, list[int]] = {}
    for _, events in sorted(read_ledger(folder).items()):
        steps |= {event["step"]: event["trained"] for event in events if event["event"] == "step"}
    return [ordinals for _, ordinals in sorted(steps.items())]


@pytest.mark.parametrize(
    ("schedule", "equal"),
    [
        ({"max_lag": 0}, True),
        ({"max_lag": 1, "lag_mode": "exact"}, True),
        ({"max_lag": 2}, False),
    ],
    ids=["max_lag_0", "exact_1", "at_most_2"],
)
def test_faults_change_nothing(tmp_path, schedule, equal):
    with faulted_run(tmp_path, schedule=schedule) as run:
        last = strike_in_turn(run, seed=7)
        with resume(run.recipe, run.folder, f"schedule.steps={last}") as resumed:
            resumed.succeed()
            audit = resumed.audit()
        with start(run.recipe, f"schedule.steps={last}", "run.name=calm") as calm:
            calm.succeed()
            assert calm.audit().terms == 1
            assert audit.terms > 4
            assert trained(run.folder) == trained(calm.folder)
            assert len(trained(calm.folder)) == last
            if equal:
                assert state(run.folder) == state(calm.folder)
