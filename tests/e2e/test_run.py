"""The main job on real parts: prompts, vLLM, rewards, DeepSpeed, new weights, again and again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.whole_run import VLLM, start, write_recipe

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
    with start(recipe) as run:
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


@pytest.mark.parametrize("max_lag", [1, 4])
def test_a_fast_generator_runs_max_lag_ahead(tmp_path, max_lag):
    recipe = write_recipe(tmp_path, schedule={"steps": 12, "max_lag": max_lag})
    with start(recipe) as run:
        run.succeed()
        counts = run.audit().lag_counts
        assert max(counts, key=counts.__getitem__) == max_lag
        assert max(counts) == max_lag


def test_two_of_each_worker_share_the_work(tmp_path):
    recipe = write_recipe(
        tmp_path,
        schedule={"steps": 6, "prompts_per_step": 16},
        generator={"replicas": 2, "engine": {"name": "deterministic", "token_seconds": 0.01}},
        reward={"replicas": 2, "max_groups": 4},
    )
    with start(recipe) as run:
        run.wait_for_step(4)
        grpcurl(run.address("learner"), "offbeat.v1.LearnerService/Pause")
        for service, counter in (("generator", "groupsFinished"), ("reward", "groupsFinished")):
            files = sorted(run.folder.glob(f"addresses/{service}.*"))
            assert len(files) == 2
            done = [
                int(
                    json.loads(grpcurl(file.read_text(), f"{SERVICES[service]}/GetStatus")).get(
                        counter, 0
                    )
                )
                for file in files
            ]
            assert min(done) >= 0.2 * sum(done), (service, done)
        grpcurl(run.address("learner"), "offbeat.v1.LearnerService/Resume")
        run.succeed()
        run.audit()
