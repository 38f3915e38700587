"""`kill -9` of every process of a run, at any instant: the run finishes and its audit is clean.

Pass condition of all tests here: exit code 0, and each ordinal counts exactly once in the history of the weights.
"""

import asyncio
import random
import signal
import time

import psutil
import pytest

from offbeat.local.status import run_status
from offbeat.report.records import read_metrics
from tests.harness.whole_run import DETERMINISTIC, VLLM, resume, start, write_recipe

SERVICES = ("redis", "checkpoint", "generator", "reward", "learner")

CRASHES = {
    "inside a publish": "publish.sending:4",
    "between publish and checkpoint": "learner.published:2",
    "inside a checkpoint": "checkpoint.before_rename:2",
    "before a checkpoint counts": "checkpoint.before_committed:2",
    "after a checkpoint, before its entries are settled": "checkpoint.after_committed:2",
}
"""Where a learner dies -> the failpoint. A restarted learner dies again at the same count, until it gets past it."""


def kill_each(run, steps_between):
    """Kills each of the five processes in turn, and waits for progress after each."""
    run.wait_for_step(3)
    for service in SERVICES:
        run.kill(service)
        if run.step() < steps_between * 5:
            run.wait_for_step(run.step() + 1)


def test_each_process_may_die(tmp_path):
    recipe = write_recipe(
        tmp_path, schedule={"steps": 24}, learner={"checkpoints": {"every_steps": 3}}
    )
    with start(recipe) as run:
        kill_each(run, steps_between=4)
        run.succeed()
        audit = run.audit()
        assert audit.trained == 24 * 8
        assert audit.terms >= 2
        metrics = read_metrics(run.folder)
        assert [line["step"] for line in metrics.steps] == list(range(1, 25))
        assert len(metrics.starts) == audit.terms
        assert len(metrics.rolled_back) >= audit.retrained_steps - 1  # killed before it could tell


def check_status(run):
    """Every worker is seen, with its heartbeat and what it gets done."""
    found = asyncio.run(run_status(run.folder))
    workers = [member for member in found.members if member.service in {"generator", "reward"}]
    assert len(workers) == 4
    assert all(worker.seconds_since_beat is not None for worker in workers)
    assert sum(worker.groups_per_minute for worker in workers) > 0


@pytest.mark.slow
def test_a_rolling_restart_loses_nothing(tmp_path):
    """SIGTERM to one process after the other, as an upgrade does, and a machine that is reclaimed: no work is lost."""
    recipe = write_recipe(
        tmp_path,
        schedule={"steps": 100_000},
        generator={"replicas": 2, "engine": DETERMINISTIC | {"token_seconds": 0.005}},
        reward={"replicas": 2},
        learner={"checkpoints": {"every_steps": 1000}},
    )
    with start(recipe) as run:
        run.wait_for_step(2)
        check_status(run)
        for service in SERVICES:
            ended = run.kill(service, signal.SIGTERM)
            run.wait_for(lambda ended=ended: not psutil.pid_exists(ended), f"the end of {service}")
            run.wait_for_step(run.step() + 2)
        run.close()
        audit = run.audit()
        assert audit.terms == 2
        assert audit.trained == audit.steps * 8
        assert (audit.dead, audit.reissued, audit.retrained_steps) == (0, 0, 0)


@pytest.mark.slow
def test_each_process_may_die_with_real_engines(tmp_path):
    recipe = write_recipe(
        tmp_path,
        schedule={"steps": 40},
        generator={"engine": VLLM},
        learner={"checkpoints": {"every_steps": 3}},
        run={"max_quick_crashes": 20},
    )
    with start(recipe) as run:
        kill_each(run, steps_between=6)
        run.succeed()
        assert run.audit().trained == 40 * 8


@pytest.mark.slow
def test_the_learner_may_die_before_an_entry_is_settled(tmp_path):
    """One run, a learner that dies at each checkpoint right after it counts: nothing is trained twice."""
    recipe = write_recipe(tmp_path, schedule={"steps": 5})
    environment = {"OFFBEAT_FAILPOINTS": "checkpoint.after_committed:1"}
    with start(recipe, environment=environment) as run:
        run.succeed()
        audit = run.audit()
        assert (audit.terms, audit.trained, audit.retrained_steps) == (4, 40, 0)


@pytest.mark.slow
@pytest.mark.parametrize("crash", CRASHES.values(), ids=CRASHES.keys())
def test_the_learner_may_die_anywhere(tmp_path, crash):
    recipe = write_recipe(tmp_path, schedule={"steps": 10}, run={"max_quick_crashes": 30})
    with start(recipe, environment={"OFFBEAT_FAILPOINTS": crash}) as run:
        run.succeed()
        audit = run.audit()
        assert audit.trained == 80
        assert audit.terms >= 2


@pytest.mark.slow
def test_a_killed_run_is_resumed_with_the_same_ordinals(tmp_path):
    """The command itself is killed; `--resume` goes on, and at max_lag 0 ends with the weights of a whole run."""
    recipe = write_recipe(
        tmp_path, schedule={"steps": 8, "max_lag": 0}, learner={"checkpoints": {"every_steps": 3}}
    )
    with start(recipe) as run:
        run.wait_for_step(5)
        run.kill_all()
        killed = run.folder
    with resume(recipe, killed) as run:
        run.succeed()
        audit = run.audit()
        assert (audit.trained, audit.terms) == (64, 2)
    with start(recipe) as whole:
        whole.succeed()
        assert (killed / "export" / "model.safetensors").read_bytes() == (
            whole.folder / "export" / "model.safetensors"
        ).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_random_kills(tmp_path):
    """Deterministic engine, two generators, two reward workers; the seed of the kills is printed."""
    seed = random.randrange(10**6)
    print(f"seed of the kills: {seed}")
    chance = random.Random(seed)
    recipe = write_recipe(
        tmp_path,
        schedule={"steps": 400, "prompts_per_step": 16},
        generator={"replicas": 2, "engine": DETERMINISTIC | {"token_seconds": 0.005}},
        reward={"replicas": 2, "max_groups": 4},
        learner={"checkpoints": {"every_steps": 3}},
        run={"max_quick_crashes": 1000, "max_restart_seconds": 1.0},
    )
    kills = 0
    with start(recipe) as run:
        run.wait_for_step(3)
        while kills < 100 and run.step() < 395:
            service = chance.choices(SERVICES, weights=(2, 2, 3, 3, 1))[0]
            if run.pids(service):
                run.kill(service)
                kills += 1
            time.sleep(chance.uniform(0.0, 1.5))
        run.succeed()
        audit = run.audit()
    assert kills == 100, "the run ended before all kills were made: give it more steps"
    assert audit.trained == 400 * 16
