"""The main job on real parts: prompts, vLLM, rewards, DeepSpeed, new weights, again and again."""

import contextlib
import getpass
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.whole_run import VLLM, WholeRun, start, write_recipe

SERVICES = {
    "checkpoint": "offbeat.v1.CheckpointService",
    "generator": "offbeat.v1.GeneratorService",
    "reward": "offbeat.v1.RewardService",
    "learner": "offbeat.v1.LearnerService",
}


def grpcurl(*arguments: str) -> str:
    """The real grpcurl, as a person would call it."""
    command = [
        str(Path(sys.executable).parent / "grpcurl"),
        "-plaintext",
        "-max-time",
        "20",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_run_on_vllm_and_deepspeed(tmp_path):
    """On-policy (max_lag 0), so engine and learner must agree on every token of each step's first update."""
    recipe = write_recipe(
        tmp_path,
        schedule={"steps": 20, "max_lag": 0},
        generator={"engine": VLLM},
        evaluation={"prompts": 10, "pass_threshold": 0.5},
    )
    with temporary_files() as folder, start(recipe, environment={"TMPDIR": folder}) as run:
        run.wait_for_step(1)
        grpcurl(run.address("learner"), "offbeat.v1.LearnerService/Pause")
        for service, name in SERVICES.items():
            address = run.address(service)
            answer = json.loads(grpcurl(address, "grpc.health.v1.Health/Check"))
            assert answer == {"status": "SERVING"}, service
            assert name in grpcurl(address, "list")
            assert "rpc GetStatus" in grpcurl(address, "describe", name)
        grpcurl(run.address("learner"), "offbeat.v1.LearnerService/Resume")
        run.succeed()
        audit = run.audit()
        assert (audit.trained, audit.dead, audit.versions) == (160, 0, 21)
        assert audit.lag_counts == {0: 160}
        _check_metrics(run.metrics())
        _check_export(run.folder / "export")


@contextlib.contextmanager
def temporary_files() -> Iterator[str]:
    """A folder with a short name, for sockets; it must be empty at the end but for a cache."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        left = {path.name for path in Path(folder).iterdir()}
        assert left <= {f"torchinductor_{getpass.getuser()}"}


def _check_metrics(lines: list[dict[str, Any]]) -> None:
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert max(line["logprob_diff/max"] for line in steps) < 1e-3
    evaluated = [line for line in lines if "eval/greedy/pass@1" in line]
    assert [line["step"] for line in evaluated] == [0, 20]
    assert all(line["eval/greedy/prompts"] == 10 for line in evaluated)


def _check_export(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("ab", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > 2


@pytest.mark.parametrize("max_lag", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_fast_generator_runs_max_lag_ahead(tmp_path, max_lag):
    # So many micro-batches that the learner is the slow one, however busy the machine is.
    learner = {"batching": {"micro_batch_tokens": 12}}
    schedule = {"steps": 12, "prompts_per_step": 48, "max_lag": max_lag}
    recipe = write_recipe(tmp_path, schedule=schedule, learner=learner)
    with start(recipe) as run:
        run.succeed()
        counts = run.audit().lag_counts
        assert max(counts, key=counts.__getitem__) == max_lag
        assert max(counts) == max_lag


def test_two_of_each_worker_share_the_work(tmp_path):
    """Counted from the moment at which all are there."""
    recipe = write_recipe(
        tmp_path,
        schedule={"steps": 50, "prompts_per_step": 16},
        generator={"replicas": 2, "engine": {"name": "deterministic", "token_seconds": 0.01}},
        reward={"replicas": 2, "max_groups": 4},
    )
    with start(recipe) as run:
        before = _groups_finished(run, at_step=3)
        after = _groups_finished(run, at_step=13)
        run.succeed()
        run.audit()
    for service in ("generator", "reward"):
        done = [
            after[address] - before.get(address, 0) for address in after if address[0] == service
        ]
        assert len(done) == 2
        assert sum(done) > 0
        assert min(done) >= 0.2 * sum(done), (service, done)


def _groups_finished(run: WholeRun, *, at_step: int) -> dict[tuple[str, str], int]:
    """(service, address) -> groups, while the learner stands still at about that step."""
    run.wait_for_step(at_step)
    grpcurl(run.address("learner"), "offbeat.v1.LearnerService/Pause")
    found = {}
    for service in ("generator", "reward"):
        for file in run.wait_for(partial(_pair, run.folder, service), f"two of {service}"):
            answer = json.loads(grpcurl(file.read_text(), f"{SERVICES[service]}/GetStatus"))
            found[service, file.name] = int(answer.get("groups_finished", 0))
    grpcurl(run.address("learner"), "offbeat.v1.LearnerService/Resume")
    return found


def _pair(folder: Path, service: str) -> list[Path] | None:
    """The address files of a service once both of its processes have written theirs."""
    files = sorted(folder.glob(f"addresses/{service}.*"))
    return files if len(files) == 2 else None


@pytest.mark.slow
def test_dynamic_sampling_and_a_policy_gradient(tmp_path):
    """Cohorts of 12 for steps of at most 8: every ordinal is trained, filtered or dead, and the lag stays bounded."""
    recipe = write_recipe(
        tmp_path,
        schedule={"oversample": 1.5},
        learner={
            "loss": {"name": "dapo", "overlong_buffer": 4},
            "corrections": [{"name": "tis"}],
            "filter_equal_groups": True,
        },
    )
    with start(recipe) as run:
        run.succeed()
        audit = run.audit()
        assert audit.trained + audit.filtered + audit.dead == 4 * 12
        assert 0 < audit.trained <= 4 * 8
        assert audit.filtered >= 4 * 4
        last = [line for line in run.metrics() if "advantage/std" in line][-1]
        assert {"alarm/ess", "alarms", "reward_component/early_letters", "correction/mean"} <= set(
            last
        )
        assert last["filtered_fraction"] >= 4 / 12
