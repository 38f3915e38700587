"""PPO's critic: trained, saved and resumed under every ZeRO stage, with one rank and two, and never published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from offbeat.errors import ModelError
from services.learner.critic import load_critic
from services.learner.trainer import Trainer
from tests.harness.training import Ranks, make_recipe, recorded_groups, run_job

SEPARATE = {"name": "ppo", "critic": "separate", "critic_lr": 3e-3}
SHARED = {"name": "ppo", "critic": "shared_head"}
BOTH = pytest.mark.parametrize("loss", [SEPARATE, SHARED], ids=lambda loss: loss["critic"])
CUT = {"mini_batches": 2, "passes": 2, "micro_batch_tokens": 150}

Weights = dict[str, torch.Tensor]


def distance(left: Weights, right: Weights) -> float:
    assert left.keys() == right.keys()
    return max(float((left[k].float() - right[k].float()).abs().max()) for k in left)


def saved(folder: Path) -> Weights:
    """All parts of the state but the random generators, the critic's with a prefix."""
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        prefix = f"{file.parent.name}/" if file.parent != folder else ""
        tensors = load_file(file)
        found |= {prefix + k: v for k, v in tensors.items() if not k.startswith("rng/")}
    return found


def is_of_critic(name: str) -> bool:
    return name.startswith("critic/") or "value_head" in name


@BOTH
def test_the_critic_learns_and_is_never_published(
    policy: Path, tmp_path: Path, loss: dict[str, Any]
) -> None:
    trainer = Trainer(make_recipe(policy, loss=loss, batching=CUT))
    try:
        errors = [trainer.train_step(recorded_groups(0))["value_loss"] for _ in range(8)]
        snapshot = trainer.snapshot()
        trainer.save(tmp_path / "state")
        trainer.export(tmp_path / "export")
    finally:
        trainer.close()
    assert errors[-1] < errors[0] * 0.8
    start = AutoModelForCausalLM.from_pretrained(policy)
    assert snapshot.tensors.keys() <= start.state_dict().keys()
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report["unexpected_keys"]
    state = saved(tmp_path / "state")
    assert {name.rpartition("/")[0] for name in state if is_of_critic(name)} >= (
        {"critic/master", "critic/exp_avg", "critic/exp_avg_sq"}
        if loss is SEPARATE
        else {"master", "exp_avg", "exp_avg_sq"}
    )
    heads = [v for k, v in state.items() if k.endswith(("score.weight", "value_head.weight"))]
    assert all(head.abs().max() > 0 for head in heads)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_train_and_resume_the_critic_of_one(
    policy: Path, ranks: Ranks, tmp_path: Path, loss: dict[str, Any], stage: int
) -> None:
    """One rank at stage 0 without a pause; two ranks at stage 2 or 3, saved and resumed in between."""
    plain = make_recipe(policy, loss=loss, batching={"mini_batches": 2})
    job = {"recipe": plain.model_dump(), "steps": [0, 1], "save": tmp_path / "one"}
    expected, metrics = run_job(job)
    recipe = make_recipe(policy, loss=loss, batching=CUT | {"passes": 1}, zero_stage=stage)
    ranks.run(recipe, steps=[0], save=str(tmp_path / "half"))
    weights, of_ranks = ranks.run(
        recipe, steps=[1], load=str(tmp_path / "half"), save=str(tmp_path / "two")
    )
    assert distance(weights, expected.tensors) < 1e-5
    left, right = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert any(is_of_critic(name) for name in left)
    assert distance(left, right) < 1e-5
    for name in ("value_loss", "value/mean", "return/mean", "advantage/std"):
        assert of_ranks[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5)


@BOTH
def test_a_resumed_run_is_bit_equal(policy: Path, tmp_path: Path, loss: dict[str, Any]) -> None:
    job = {"recipe": make_recipe(policy, loss=loss, batching=CUT).model_dump()}
    run_job({**job, "steps": [0, 1], "save": tmp_path / "whole"})
    run_job({**job, "steps": [0], "save": tmp_path / "half"})
    run_job({**job, "steps": [1], "load": tmp_path / "half", "save": tmp_path / "resumed"})
    assert distance(saved(tmp_path / "whole"), saved(tmp_path / "resumed")) == 0


def test_a_critic_from_a_reward_model_keeps_its_head(policy: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    made = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    made.save_pretrained(tmp_path / "reward")
    from_reward = load_critic(tmp_path / "reward", dtype="float32")
    torch.testing.assert_close(from_reward.score.weight, made.score.weight)
    assert (load_critic(policy, dtype="float32").score.weight == 0).all()
    with pytest.raises(ModelError, match="PPO's critic"):
        load_critic(tmp_path / "nowhere", dtype="float32")
