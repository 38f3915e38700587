"""The losses that TRL has, against TRL's own code on the same tensors.

TRL's trainers can't be built without a model and data, but `_compute_loss` needs little of its object:
a stand-in gives it those attributes, and the log-probs of a policy.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.losses import MAX_TOKENS, Run, Step, build, correction, make_step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trl() -> Any:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    rloo = pytest.importorskip("trl.trainer.rloo_trainer")
    return SimpleNamespace(grpo=trainer.GRPOTrainer, rloo=rloo.RLOOTrainer)


GSPO = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}


class Accelerator:
    """One process."""

    num_processes = 1

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class Metrics(dict[str, Any]):
    """Takes in whatever is logged."""

    def __missing__(self, key: str) -> Any:
        return self.setdefault(key, Metrics() if key == "train" else [])


def even_step(seed: int) -> Step:
    """Groups of four, with padding, ties, one-token completions, and masks."""
    return make_step(seed, (4, 4, 4))


def grouped(rewards: torch.Tensor, scale: str) -> torch.Tensor:
    """TRL's advantage: three lines of its `_generate_and_score_completions`, which can't be called apart."""
    by_group = rewards.view(-1, 4)
    advantages = (rewards - by_group.mean(dim=1).repeat_interleave(4)).clone()
    if scale == "none":
        return advantages
    return advantages / (by_group.std(dim=1).repeat_interleave(4) + 1e-4)


def tensors(run: Run) -> dict[str, torch.Tensor]:
    """All rows of the step as TRL wants them: padded with 0, masks of integers."""
    rows = list(range(len(run.batch.samples)))
    step = run.step

    def padded(flat: np.ndarray) -> torch.Tensor:
        return run.batch.padded(flat, rows).double()

    index = run.batch.padded(np.arange(len(run.batch.mask)), rows)
    inside = run.batch.padded(np.ones(len(run.batch.mask), np.bool_), rows)
    policy = torch.where(inside, run.logprobs[index], 0.0)
    return {
        "policy": policy,
        "old": padded(step.old),
        "ref": padded(step.reference),
        "mu": padded(run.batch.behaviour),
        "mask": run.batch.padded(run.batch.mask, rows).long(),
        "rewards": torch.tensor(run.batch.rewards),
    }


def trl_grpo(
    trl: Any, run: Run, *, loss_type: str, scale: str = "group", beta: float = 0.0, **options: Any
) -> torch.Tensor:
    found = tensors(run)
    old = found["mu"] if options.pop("old_is_mu", False) else found["old"]
    mask, count = found["mask"], len(found["mask"])
    ones = torch.ones(count, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": grouped(found["rewards"], scale),
        "old_per_token_logps": old,
        "ref_per_token_logps": found["ref"],
        "sampling_per_token_logps": found["mu"],
        "num_items_in_batch": mask.sum(),
    }
    if "importance_sampling_ratio" in options:
        inputs["importance_sampling_ratio"] = options.pop("importance_sampling_ratio")
    arguments = SimpleNamespace(
        delta=None, use_bias_correction_kl=False,
        vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )  # fmt: skip
    arguments.steps_per_generation = 1
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (found["policy"], torch.zeros_like(old), None),
        get_off_policy_mask=trl.grpo.get_off_policy_mask,
        get_gamma_weights=trl.grpo.get_gamma_weights,
        accelerator=Accelerator(), args=arguments, model=SimpleNamespace(training=True),
        loss_type=loss_type, beta=beta, max_completion_length=MAX_TOKENS,
        epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token",
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False,
        use_vllm="importance_sampling_ratio" in inputs, vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, _metrics=Metrics(),
    )  # fmt: skip
    for name, value in options.items():
        setattr(stand_in, name, value)
    loss: torch.Tensor = trl.grpo._compute_loss(stand_in, None, inputs)
    return loss


def assert_same(ours: Run, theirs: Run, loss: torch.Tensor) -> None:
    total = ours.total()
    total.backward()
    loss.backward()
    torch.testing.assert_close(total, loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours.logprobs.grad, theirs.logprobs.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "values", "options"),
    [
        ("grpo", {}, {"loss_type": "grpo"}),
        ("grpo", {"scale": "none"}, {"loss_type": "grpo", "scale": "none"}),
        ("grpo", {"kl_coef": 0.1, "kl_in": "loss"}, {"loss_type": "grpo", "beta": 0.1}),
        ("dr_grpo", {}, {"loss_type": "dr_grpo", "scale": "none"}),
        ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("dapo", {"kl_coef": 0.1, "kl_in": "loss"}, {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1}),
        ("cispo", {"ratio_max": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
        ("gspo", {}, {"loss_type": "grpo", "importance_sampling_level": "sequence", **GSPO}),
        ("vespo", {}, {"loss_type": "vespo", "old_is_mu": True}),
    ],
)  # fmt: skip
def test_grpo_and_its_variants(
    trl: Any, seed: int, name: str, values: dict[str, Any], options: dict[str, Any]
) -> None:
    ours, theirs = (Run(build(name, values), even_step(seed)) for _ in range(2))
    assert_same(ours, theirs, trl_grpo(trl, theirs, **options))


@pytest.mark.parametrize("seed", range(4))
def test_the_off_policy_sequence_mask(trl: Any, seed: int) -> None:
    """TRL takes the present policy for it; ours is pi_old: the same where they are equal."""
    step = even_step(seed)
    step.old = step.policy
    chosen = [correction("sequence_mask", delta=0.02)]
    ours, theirs = (Run(build("grpo", {}, chosen), step) for _ in range(2))
    assert_same(
        ours, theirs, trl_grpo(trl, theirs, loss_type="grpo", off_policy_mask_threshold=0.02)
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["tis", "masked_is", "sequence_is"])
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_importance_weights(trl: Any, seed: int, name: str, loss: str) -> None:
    """TRL's ratios by its documentation (its code computes them amid generation), through its own loss."""
    bounds: dict[str, Any] = {"cap": 1.1} if name == "tis" else {"low": 0.8, "high": 1.2}
    chosen = [correction(name, **bounds)]
    clip = {} if loss == "grpo" else {"clip_low": 0.2, "clip_high": 0.2}
    ours, theirs = (Run(build(loss, clip, chosen), even_step(seed)) for _ in range(2))
    found = tensors(theirs)
    difference = (found["old"] - found["mu"]) * found["mask"]
    if name == "sequence_is":
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = difference.exp()
    if name == "tis":
        ratio = ratio.clamp(max=1.1)
    elif name == "sequence_is":
        ratio = ratio.clamp(0.8, 1.2)
    else:
        ratio = ratio.masked_fill((ratio < 0.8) | (ratio > 1.2), 0.0)
    level = "token" if loss == "grpo" else "sequence"
    expected = trl_grpo(
        trl,
        theirs,
        loss_type="grpo",
        importance_sampling_level=level,
        importance_sampling_ratio=ratio,
    )
    assert_same(ours, theirs, expected)


@pytest.mark.parametrize("seed", range(4))
def test_proximal_rloo(trl: Any, seed: int) -> None:
    ours, theirs = (Run(build("proximal_rloo"), even_step(seed)) for _ in range(2))
    found = tensors(theirs)
    mask = found["mask"]
    ones = torch.ones(len(mask), 1, dtype=torch.long)
    returns = found["rewards"] - 0.05 * ((found["old"] - found["ref"]) * mask).sum(-1)
    by_group = returns.view(-1, 4)
    others = (by_group.sum(dim=1, keepdim=True) - by_group) / 3
    inputs = {
        "prompt_ids": ones, "prompt_mask": ones,
        "completion_ids": torch.zeros_like(mask), "completion_mask": mask,
        "advantages": returns - others.view(-1), "old_logps": (found["old"] * mask).sum(-1),
    }  # fmt: skip
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (found["policy"], torch.zeros_like(found["old"]), None),
        epsilon_low=0.2, epsilon_high=0.2, aux_loss_enabled=False, accelerator=Accelerator(),
        model=SimpleNamespace(training=True), _metrics=Metrics(),
    )  # fmt: skip
    assert_same(ours, theirs, trl.rloo._compute_loss(stand_in, None, inputs))
