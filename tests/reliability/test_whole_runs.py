"""Faults that need a whole run each; `make reliability` draws the others at random."""

import os
import random
import shutil
import signal
import time

import pytest
import redis

from offbeat.local.redis_server import MIB, RedisServer
from tests.harness import faults as known
from tests.harness.faulted_run import faulted_run
from tests.harness.proxy import ProxyThread
from tests.harness.services import COHORT, Services
from tests.harness.whole_run import VLLM, resume
from tests.reliability.campaign import holds, play, rounds
from tests.reliability.stale import overtake

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENDS_ON_CONFIG = 2


def test_each_kind_of_fault(tmp_path):
    """One round of the campaign with each kind once."""
    first = rounds(share=0.0)[0]
    assert play(first, tmp_path / "run", 11, print).audit["clean"]


def test_faults_with_a_real_engine(tmp_path):
    """The same faults while vLLM generates, one after the other."""
    plan = [
        known.GENERATOR_KILL,
        known.REWARD_KILL,
        known.LEARNER_KILL,
        known.REDIS_KILL,
        known.CHECKPOINT_KILL,
        known.REDIS_NETWORK[1],
        known.WEIGHTS_NETWORK[2],
        known.REDIS_EMPTIED,
    ]
    sections = {
        "generator": {"replicas": 1, "engine": VLLM},
        "reward": {"replicas": 1},
        "schedule": {"prompts_per_step": 8},
    }
    chance = random.Random(3)
    with faulted_run(tmp_path, **sections) as run:
        run.wait_until(lambda: run.step() >= 2, "step 2")
        for fault in plan:
            recovered = fault.strike(run, chance)
            run.wait_until(lambda recovered=recovered: holds(recovered), fault.passes)
        last = run.step() + 5
        run.kill_all()
        with resume(run.recipe, run.folder, f"schedule.steps={last}") as resumed:
            resumed.succeed()
            assert resumed.audit().trained == last * 8


def test_overtaken_learners_change_nothing(tmp_path):
    """W4: a learner is frozen, a second one takes over; the first wakes, is refused, and ends."""
    found = overtake(tmp_path / "run", 5, ("", "publish.sending", "checkpoint.before_rename"))
    assert found.stale == 0


ALL = ("redis", "checkpoint", "generator", "reward", "learner")
ORDERS = [ALL[::-1], *(tuple(random.Random(seed).sample(ALL, 5)) for seed in range(3))]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_services_may_start_in_any_order(tmp_path, order):
    """L3: the backward order and some of the 120 at random. Nothing ends because something else is not there yet."""
    with Services(tmp_path, schedule={"steps": 6}) as run:
        for name in order:
            run.start(name)
            time.sleep(2.0)
        run.wait_for_steps(1)
        assert all(process.poll() is None for process in run.processes), run.output()
        run.wait_for(lambda: len(run.steps()) == 6, "all steps")
        learner = run.processes[[name for name in order if name != "redis"].index("learner")]
        assert learner.wait(120) == 0, run.output()
        assert run.audit(max_lag=1).trained == 6 * COHORT


def test_a_slow_learner_bounds_what_is_queued(tmp_path):
    """R6: the learner stands still for a while; the others stop at the bound, and nothing is trimmed or lost."""
    max_lag, size = 2, 16
    with faulted_run(tmp_path, schedule={"max_lag": max_lag}) as run:
        run.wait_until(lambda: run.step() >= 5, "step 5")
        [learner] = run.pids("learner")
        os.kill(learner, signal.SIGSTOP)
        depths = []
        for _ in range(60):
            run.poll()
            depths.append(run.backlog())
            time.sleep(0.2)
        os.kill(learner, signal.SIGCONT)
        # Cohorts under way, and what waits for a checkpoint that contains it.
        bound = (max_lag + 1 + 3 + 1) * size
        assert max(depths) <= bound
        assert depths[-1] == depths[-20], "still growing"
        seen = len(run.steps)
        run.wait_until(lambda: len(run.steps) > seen + 5, "further steps")
        run.kill_all()
        with resume(run.recipe, run.folder, f"schedule.steps={run.step() + 3}") as resumed:
            resumed.succeed()
            assert resumed.audit().max_lag_seen <= max_lag


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_failover_that_rolls_back(tmp_path, kind):
    """R4: the replica misses the last writes, is promoted, and what it lacks is issued again."""
    binary = None if kind == "valkey" else shutil.which("redis-server")
    if kind == "redis" and binary is None:
        pytest.skip("redis-server is not installed")
    with (
        faulted_run(tmp_path / "run", redis_binary=binary) as run,
        RedisServer(tmp_path / "replica", binary=binary, max_memory_bytes=256 * MIB) as replica,
        ProxyThread(run.server.url.split("/")[2]) as replication,
        redis.Redis.from_url(replica.url) as promoted,
    ):
        host, _, port = replication.address.rpartition(":")
        promoted.replicaof(host, port)
        run.wait_until(lambda: promoted.info()["master_link_status"] == "up", "the replica")
        run.wait_until(lambda: run.step() >= 5, "step 5")
        replication.do(lambda proxy: proxy.stall())
        lost_from = run.step()
        run.wait_until(lambda: run.step() >= lost_from + 4, "steps that the replica misses")
        run.redis_proxy.do(lambda proxy: setattr(proxy, "target", replica.url.split("/")[2]))
        run.server.kill()
        promoted.replicaof("NO", "ONE")
        run.redis_proxy.do(lambda proxy: proxy.cut())
        seen = len(run.steps)
        run.wait_until(lambda: len(run.steps) >= seen + 8, "steps after the failover")
        last = run.step() + 3
        run.kill_all()
        with resume(run.recipe, run.folder, f"schedule.steps={last}") as resumed:
            resumed.succeed()
            assert resumed.audit().reissued > 0


def test_a_disk_that_fails_at_a_checkpoint_ends_the_run_and_a_resumed_one_goes_on(tmp_path):
    """An fsync that fails: what it was for does not count, earlier checkpoints do, and the user is told."""
    with faulted_run(tmp_path) as run:
        run.wait_until(lambda: run.step() >= 8, "step 8")
        hit = run.arm("checkpoint.fsync")
        code = run.wait()
        assert hit()
        assert code == ENDS_ON_CONFIG
        assert "Input/output error" in run.output()
        assert "earlier checkpoints are untouched" in run.output()
        last = run.step() + 3
        with resume(run.recipe, run.folder, f"schedule.steps={last}") as resumed:
            resumed.succeed()
            assert resumed.audit().trained == last * 16
