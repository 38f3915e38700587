"""The losses against plain float64 loops, finite differences, and their corner cases."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from offbeat.config.learner import RLOO, CustomLoss, OnlineDPO, ProximalRLOO
from offbeat.errors import ConfigError
from services.learner.losses import LossInputs, build_loss
from services.learner.losses.base import MAX_LOG_RATIO
from services.learner.losses.online_dpo import OnlineDPOLoss, best_and_worst
from services.learner.losses.rloo import ProximalRLOOLoss, RLOOLoss, leave_one_out


def make_inputs(seed: int, unit_sizes: tuple[int, ...], width: int = 5) -> LossInputs:
    """Random float64 inputs of unequal lengths, the first row of one token; NaN at padding."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(unit_sizes)
    lengths = torch.randint(1, width + 1, (count,), generator=generator)
    lengths[0], lengths[-1] = 1, width
    mask = torch.arange(width) < lengths[:, None]

    def logprobs() -> torch.Tensor:
        values = -2 * torch.rand(count, width, generator=generator, dtype=torch.float64)
        return values.masked_fill(~mask, float("nan"))

    rewards = torch.randint(0, 4, (count,), generator=generator).double()
    return LossInputs(
        logprobs_B_T=logprobs().requires_grad_(),
        old_logprobs_B_T=logprobs(),
        behaviour_logprobs_B_T=logprobs(),
        reference_logprobs_B_T=logprobs(),
        mask_B_T=mask,
        rewards_B=rewards,
        unit_sizes=unit_sizes,
    )


def row_sum(values: torch.Tensor, mask: torch.Tensor, row: int) -> float:
    return sum(float(values[row, t]) for t in range(mask.shape[1]) if mask[row, t])


def sums(inputs: LossInputs, name: str) -> list[float]:
    values = getattr(inputs, name).detach()
    return [row_sum(values, inputs.mask_B_T, row) for row in range(len(values))]


def expected_advantages(inputs: LossInputs, kl_coef: float) -> list[float]:
    old, reference = sums(inputs, "old_logprobs_B_T"), sums(inputs, "reference_logprobs_B_T")
    returns = [
        float(reward) - kl_coef * (old[i] - reference[i])
        for i, reward in enumerate(inputs.rewards_B)
    ]
    advantages, start = [], 0
    for size in inputs.unit_sizes:
        group = returns[start : start + size]
        for place, value in enumerate(group):
            others = group[:place] + group[place + 1 :]
            advantages.append(value - sum(others) / len(others))
        start += size
    return advantages


@pytest.mark.parametrize("seed", range(5))
def test_online_dpo_equals_a_loop(seed: int) -> None:
    inputs = make_inputs(seed, (2, 2, 2))
    policy, reference = sums(inputs, "logprobs_B_T"), sums(inputs, "reference_logprobs_B_T")
    expected = []
    for best in (0, 2, 4):
        margin = (policy[best] - reference[best]) - (policy[best + 1] - reference[best + 1])
        expected.append(math.log1p(math.exp(-0.3 * margin)))
    output = OnlineDPOLoss(beta=0.3)(inputs)
    torch.testing.assert_close(output.terms, torch.tensor(expected, dtype=torch.float64))
    assert set(output.metrics) == set(OnlineDPOLoss.metric_names)


@pytest.mark.parametrize(
    ("rewards", "pair"),
    [
        ([1.0, 0.0], (0, 1)),
        ([0.0, 1.0, 1.0, 0.0], (1, 0)),
        ([2.0, 5.0, 5.0, -1.0, -1.0], (1, 3)),
        ([0.5, 0.5, 0.5], None),
        ([1.0], None),
    ],
)
def test_pairs_take_the_lowest_index_among_equals(
    rewards: list[float], pair: tuple[int, int] | None
) -> None:
    assert best_and_worst(np.array(rewards)) == pair
    assert OnlineDPOLoss(0.1).units(np.array(rewards)) == ([] if pair is None else [pair])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clip", [None, 0.2])
def test_rloo_equals_a_loop(seed: int, clip: float | None) -> None:
    inputs = make_inputs(seed, (4, 2, 3))
    policy, old = sums(inputs, "logprobs_B_T"), sums(inputs, "old_logprobs_B_T")
    expected, beyond = [], []
    for advantage, log_ratio in zip(
        expected_advantages(inputs, 0.05), np.subtract(policy, old), strict=True
    ):
        ratio = math.exp(log_ratio)
        term = -advantage * ratio
        if clip is not None:
            clipped = -advantage * min(max(ratio, 1 - clip), 1 + clip)
            beyond.append(clipped > term)
            term = max(term, clipped)
        expected.append(term)
    loss = RLOOLoss(0.05) if clip is None else ProximalRLOOLoss(0.05, clip)
    output = loss(inputs)
    torch.testing.assert_close(output.terms, torch.tensor(expected, dtype=torch.float64))
    if clip is not None:
        assert output.metrics["clip_fraction"].tolist() == beyond
        assert any(beyond)


@pytest.mark.parametrize("loss", [OnlineDPOLoss(0.3), RLOOLoss(0.05), ProximalRLOOLoss(0.05, 0.2)])
def test_gradients_equal_finite_differences(loss: RLOOLoss) -> None:
    inputs = make_inputs(7, (2, 2, 2))
    clean = torch.where(inputs.mask_B_T, inputs.logprobs_B_T.detach(), 0.0).requires_grad_()

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        return loss(replace(inputs, logprobs_B_T=logprobs)).terms.sum()

    assert torch.autograd.gradcheck(total, (clean,))
    total(clean).backward()
    assert clean.grad is not None
    assert (clean.grad[~inputs.mask_B_T] == 0).all()


def test_rloo_on_policy_has_the_gradient_of_reinforce() -> None:
    inputs = make_inputs(3, (4, 4))
    inputs = replace(inputs, old_logprobs_B_T=inputs.logprobs_B_T.detach())
    advantages = expected_advantages(inputs, 0.05)
    RLOOLoss(0.05)(inputs).terms.sum().backward()
    gradient = inputs.logprobs_B_T.grad
    assert gradient is not None
    expected = -torch.tensor(advantages, dtype=torch.float64)[:, None] * inputs.mask_B_T
    torch.testing.assert_close(gradient, expected)


def test_nan_at_padding_reaches_neither_terms_nor_gradient() -> None:
    inputs = make_inputs(1, (2, 2))
    for loss in (OnlineDPOLoss(0.1), RLOOLoss(0.05), ProximalRLOOLoss(0.05, 0.2)):
        inputs.logprobs_B_T.grad = None
        loss(inputs).terms.sum().backward()
        assert inputs.logprobs_B_T.grad is not None
        assert torch.isfinite(inputs.logprobs_B_T.grad).all()


def test_equal_returns_have_advantages_of_exactly_zero() -> None:
    returns = torch.full((7,), 0.1)
    assert (leave_one_out(returns, (3, 4)) == 0).all()
    assert (leave_one_out(torch.tensor([5.0, 1.0, 3.0]), (1, 2))[0] == 0).all()


def test_huge_ratios_stay_finite() -> None:
    inputs = make_inputs(2, (2, 2))
    far = torch.where(inputs.mask_B_T, torch.tensor(-1e4, dtype=torch.float64), 0.0)
    output = RLOOLoss(0.0)(replace(inputs, old_logprobs_B_T=far, reference_logprobs_B_T=None))
    assert torch.isfinite(output.terms).all()
    assert output.terms.abs().max() <= 4 * math.exp(MAX_LOG_RATIO)


def test_rloo_without_kl_leaves_out_groups_of_equal_rewards() -> None:
    assert RLOOLoss(0.0).units(np.array([1.0, 1.0])) == []
    assert RLOOLoss(0.05).units(np.array([1.0, 1.0])) == [(0, 1)]
    assert RLOOLoss(0.0).units(np.array([1.0, 0.0, 1.0])) == [(0, 1, 2)]


def test_terms_of_a_unit_do_not_depend_on_its_neighbours() -> None:
    inputs = make_inputs(9, (3, 3, 3))
    order = [6, 7, 8, 0, 1, 2, 3, 4, 5]
    moved = replace(
        inputs,
        **{
            name: getattr(inputs, name)[order]
            for name in inputs.__dataclass_fields__
            if name != "unit_sizes"
        },
    )
    loss = ProximalRLOOLoss(0.05, 0.2)
    torch.testing.assert_close(loss(moved).terms, loss(inputs).terms[order])


def test_the_registry_builds_each_loss() -> None:
    assert isinstance(build_loss(OnlineDPO(name="online_dpo", beta=0.2)), OnlineDPOLoss)
    rloo = build_loss(RLOO(name="rloo", kl_coef=0.0))
    assert type(rloo) is RLOOLoss
    assert not rloo.needs_reference
    assert isinstance(build_loss(ProximalRLOO(name="proximal_rloo")), ProximalRLOOLoss)
    path = "services.learner.losses.online_dpo:OnlineDPOLoss"
    custom = build_loss(CustomLoss(name="custom", path=path, params={"beta": 0.7}))
    assert isinstance(custom, OnlineDPOLoss)
    assert custom.beta == 0.7


@pytest.mark.parametrize(
    ("path", "params", "found"),
    [
        ("services.learner.losses.online_dpo:OnlineDPOLoss", {"gamma": 1}, "gamma"),
        ("random:Random", {}, "Random without needs_reference"),
        ("services.learner.losses.rloo:no_such_loss", {}, "no_such_loss"),
    ],
)
def test_a_custom_loss_that_does_not_fit_is_one_clear_error(
    path: str, params: dict[str, object], found: str
) -> None:
    assert random.Random is not None
    with pytest.raises(ConfigError, match=found):
        build_loss(CustomLoss(name="custom", path=path, params=params))
