"""Every registered loss against slow loops written from the formulas, and what all of them must keep.

A new loss is covered as soon as it is registered: it needs an entry in `tests.harness.loss_references`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config.losses import CustomLoss, check_corrections
from offbeat.errors import ConfigError
from services.learner.batching import StepBatch, shares
from services.learner.losses import LossInputs, LossOutput, PreparedLoss, ValueLoss, build_loss
from services.learner.losses.base import MAX_LOG_RATIO
from services.learner.losses.online_dpo import OnlineDPOLoss, best_and_worst
from tests.harness import loss_references as references
from tests.harness.losses import (
    FAMILIES,
    MAX_TOKENS,
    Run,
    Step,
    build,
    correction,
    is_policy_gradient,
    make_step,
    settings_of,
)

COMMON = [
    {"kl_coef": 0.3, "kl_in": "reward"},
    {"kl_coef": 0.3, "kl_in": "loss"},
    {"whiten_rewards": True, "reward_scale": 0.5, "reward_clip": 0.4},
    {"whiten_advantages": True},
    {"whiten_advantages": True, "kl_coef": 0.3, "kl_in": "reward"},
]
OWN: dict[str, list[dict[str, Any]]] = {
    "online_dpo": [{"beta": 0.3}],
    "copg": [{"beta": 0.0}],
    "vargrad": [{"beta": 0.5}],
    "rloo": [{"kl_coef": 0.0}],
    "ppo": [{"gamma": 0.9, "gae_lambda": 0.5}, {"whiten_advantages": False, "kl_coef": 0.0}],
    "grpo": [{"scale": "batch"}, {"scale": "none", "clip_high": 0.5}],
    "dr_grpo": [{"length": 40}],
    "dapo": [{"overlong_buffer": 4}, {"overlong_buffer": 4, "overlong_penalty": 0.5}],
    "cispo": [{"ratio_max": 1.1}],
    "gspo": [{"clip_low": 0.1, "clip_high": 0.1}],
    "decoupled_ppo": [{"weight_cap": 1.1}],
    "topr": [{"baseline": "group"}],
    "m2po": [{"m2_threshold": 0.01}, {"m2_threshold": 1e3}],
    "vespo": [{"k_positive": 1.0, "lambda_negative": 0.5}],
}
CORRECTIONS = [
    [{"name": "tis", "cap": 1.1}],
    [{"name": "masked_is", "low": 0.9, "high": 1.2}],
    [{"name": "sequence_is", "mode": "truncate", "low": 0.8, "high": 1.3}],
    [{"name": "sequence_is", "mode": "mask", "low": 0.7, "high": 1.5}],
    [{"name": "sequence_mask", "delta": 0.02}],
    [{"name": "tis", "cap": 1.1}, {"name": "sequence_mask", "delta": 0.02}],
]


def allowed(name: str, corrections: list[dict[str, Any]]) -> bool:
    try:
        check_corrections(settings_of(name), [correction(**c) for c in corrections])
    except ValueError:
        return False
    return True


def cases() -> list[Any]:
    """(loss, settings, corrections) for every registered loss."""
    found = []
    for name in sorted(FAMILIES):
        common = COMMON if is_policy_gradient(name) else []
        found += [(name, values, []) for values in [{}, *OWN.get(name, []), *common]]
        found += [(name, {}, chosen) for chosen in CORRECTIONS if allowed(name, chosen)]
    return [pytest.param(*case, id=f"{case[0]}-{place}") for place, case in enumerate(found)]


EVERY_CASE = pytest.mark.parametrize(("name", "values", "corrections"), cases())
EVERY_LOSS = pytest.mark.parametrize("name", sorted(FAMILIES))


def plain_groups(run: Run, policy: np.ndarray) -> references.Groups:
    """The step as the references take it; `held` is the policy of the step itself."""
    batch, step = run.batch, run.step
    old = step.policy if run.old is None else run.old
    groups = []
    for group in range(len(batch.groups)):
        completions = []
        for row in batch.rows_of(group):
            index = batch.flat_index([row])
            index = index[batch.mask[index]]
            lists = [
                flat.astype(np.float64)[index].tolist()
                for flat in (policy, step.policy, old, batch.behaviour, step.reference)
            ]
            length = int(batch.lengths[row])
            completion = references.Completion(float(batch.rewards[row]), length, *lists)
            completion.value = step.values.astype(np.float64)[index].tolist()
            completions.append(completion)
        groups.append(completions)
    return groups


def expected(
    name: str, run: Run, corrections: list[dict[str, Any]], policy: np.ndarray | None = None
) -> float:
    given_settings = getattr(run.loss, "settings", None)
    values = (given_settings or settings_of(name, **run_values(run))).model_dump()
    if is_policy_gradient(name):
        values["kl_in"] = values["kl_in"] or given_settings.kl_default
        values["overlong_penalty"] = values.get("overlong_penalty") or 1.0
    values["all_run"] = getattr(run.loss, "equal_rewards_matter", True)
    groups = plain_groups(run, run.step.policy if policy is None else policy)
    return references.reference_loss(
        name, values, groups, corrections=corrections, longest=MAX_TOKENS
    )


def run_values(run: Run) -> dict[str, Any]:
    return {"beta": run.loss.beta} if hasattr(run.loss, "beta") else {}


def make_run(
    name: str, values: dict[str, Any], corrections: list[dict[str, Any]], step: Step, **how: Any
) -> Run:
    loss = build(name, values, [correction(**settings) for settings in corrections])
    return Run(loss, step, **how)


def test_every_registered_loss_has_a_reference() -> None:
    assert set(FAMILIES) == references.NAMES


@EVERY_CASE
@pytest.mark.parametrize("old_known", [True, False])
def test_float32_agrees_with_slow_loops(
    name: str, values: dict[str, Any], corrections: list[dict[str, Any]], old_known: bool
) -> None:
    for seed in (0,):
        run = make_run(
            name, values, corrections, make_step(seed), dtype=torch.float32, old_known=old_known
        )
        found = float(run.total().detach())
        assert found == pytest.approx(expected(name, run, corrections), rel=1e-5, abs=1e-6)


@EVERY_CASE
@pytest.mark.parametrize("old_known", [True, False])
def test_gradients_equal_finite_differences(
    name: str, values: dict[str, Any], corrections: list[dict[str, Any]], old_known: bool
) -> None:
    """Central differences of the reference, its detached factors held; random points lie off the clip edges."""
    run = make_run(name, values, corrections, make_step(5), old_known=old_known)
    run.total().backward()
    assert run.logprobs.grad is not None
    gradient = run.logprobs.grad.numpy()
    assert (gradient[~run.batch.mask] == 0).all()
    for place in np.flatnonzero(run.batch.mask)[::13]:
        sides = []
        for shift in (-1e-5, 1e-5):
            policy = run.step.policy.astype(np.float64)
            policy[place] += shift
            sides.append(expected(name, run, corrections, policy))
        difference = (sides[1] - sides[0]) / 2e-5
        assert gradient[place] == pytest.approx(difference, rel=1e-4, abs=1e-8)


@EVERY_LOSS
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_neither_loss_nor_gradient_depends_on_the_cut(name: str, data: st.DataObject) -> None:
    """Ranks, micro-batches, sorting by length, and whether pi_old was known before the update."""
    step = make_step(data.draw(st.integers(0, 50)))
    values = data.draw(st.sampled_from([{}, *(COMMON if is_policy_gradient(name) else [])]))
    old_known = data.draw(st.booleans())
    chosen = data.draw(st.sampled_from([c for c in [[], *CORRECTIONS] if allowed(name, c)]))
    whole = make_run(name, values, chosen, step, old_known=old_known)
    cut = make_run(name, values, chosen, step, old_known=old_known)
    plan = shares(
        cut.units,
        cut.batch.total_lengths,
        world=data.draw(st.integers(1, 3)),
        max_tokens=data.draw(st.integers(1, 80)),
        bucket=data.draw(st.booleans()),
    )
    parts = list(itertools.chain.from_iterable(plan))
    totals = [whole.total(), cut.total(parts)]
    for total in totals:
        total.backward()
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(whole.logprobs.grad, cut.logprobs.grad, rtol=1e-6, atol=1e-9)


@EVERY_LOSS
def test_the_policy_of_the_update_itself_may_stand_for_pi_old(name: str) -> None:
    """One update: computing pi_old first, or in the forward pass, gives the same."""
    step = make_step(8)
    known = replace(step, old=step.policy)
    for values in [{}, *(COMMON if is_policy_gradient(name) else [])]:
        runs = [
            make_run(name, values, [], known),
            make_run(name, values, [], step, old_known=False),
        ]
        for run in runs:
            run.total().backward()
        torch.testing.assert_close(runs[0].logprobs.grad, runs[1].logprobs.grad, rtol=1e-6, atol=0)


@EVERY_CASE
def test_extreme_ratios_give_neither_inf_nor_nan(
    name: str, values: dict[str, Any], corrections: list[dict[str, Any]]
) -> None:
    for old_known, spread in ((True, 1e4), (False, 100.0)):
        step = make_step(2, spread=spread)
        run = make_run(name, values, corrections, step, dtype=torch.float32, old_known=old_known)
        total = run.total()
        total.backward()
        assert torch.isfinite(total)
        assert run.logprobs.grad is not None
        assert torch.isfinite(run.logprobs.grad).all()


@EVERY_LOSS
def test_metrics_are_those_that_are_announced(name: str) -> None:
    run = make_run(name, {}, [], make_step(1))
    output = run.loss(run.inputs(run.units))
    assert set(output.metrics) == set(run.loss.metric_names)
    assert all(torch.isfinite(values.float()).all() for values in output.metrics.values())


@EVERY_LOSS
def test_equal_rewards_everywhere(name: str) -> None:
    """No group tells anything: only the pull to the reference, or plain supervision, is left."""
    step = make_step(3)
    groups = [
        replace(g, completions=tuple(replace(s, reward=0.5) for s in g.completions))
        for g in step.groups
    ]
    run = make_run(name, {}, [], replace(step, groups=groups))
    total = run.total()
    total.backward()
    assert torch.isfinite(total)
    pulls = run.loss.needs_reference and name not in {"online_dpo", "ipo"}
    moved = bool(run.logprobs.grad is not None and run.logprobs.grad.abs().max() > 0)
    assert moved == (pulls or name in {"best_of_n", "topr", "ppo"})


def test_a_step_without_groups_has_no_advantages() -> None:
    for name in FAMILIES:
        run = make_run(name, {}, [], Step([], *[np.zeros(0, np.float32)] * 4))
        assert run.units == []


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
    for name in ("online_dpo", "ipo"):
        assert build(name).units(np.array(rewards)) == ([] if pair is None else [pair])


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    for name in ("rloo", "proximal_rloo"):
        run = make_run(name, {"kl_coef": 0.0}, [], make_step(3), old_known=False)
        run.total().backward()
        inputs = run.inputs(run.units)
        rows = [row for unit in run.units for row in unit]
        index = run.batch.flat_index(rows)
        assert inputs.advantages_B_T is not None
        expected_B_T = -inputs.advantages_B_T / run.normaliser
        expected_N = expected_B_T[~inputs.logprobs_B_T.isnan()] * torch.from_numpy(
            run.batch.mask[index]
        )
        assert run.logprobs.grad is not None
        torch.testing.assert_close(run.logprobs.grad[torch.from_numpy(index)], expected_N)


def test_equal_returns_have_advantages_of_exactly_zero() -> None:
    for name in ("rloo", "grpo", "dr_grpo", "gspo"):
        loss = build(name, {"kl_coef": 0.0})
        assert isinstance(loss, PreparedLoss)
        step = make_step(4)
        groups = [
            replace(g, completions=tuple(replace(s, reward=0.1) for s in g.completions))
            for g in step.groups
        ]
        batch = StepBatch(groups, loss.units)
        assert batch.units == [[] for _ in groups]
        run = Run(build(name, {"kl_coef": 0.1, "kl_in": "loss"}), replace(step, groups=groups))
        assert (run.inputs(run.units).advantages_B_T == 0).all()


def test_a_ratio_is_cut_where_its_exponent_would_overflow() -> None:
    run = make_run("rloo", {"kl_coef": 0.0}, [], make_step(2, spread=1e3))
    inputs = run.inputs(run.units)
    terms = run.loss(inputs).terms
    assert inputs.advantages_B_T is not None
    largest = inputs.advantages_B_T.abs().max() * np.exp(MAX_LOG_RATIO) * (1 + 1e-9)
    assert terms.abs().max() <= largest


# ---- the critic


@pytest.mark.parametrize("values", [{}, {"value_clip": None, "vf_coef": 0.7}, {"gamma": 0.9}])
def test_the_critics_loss_agrees_with_slow_loops(values: dict[str, Any]) -> None:
    run = make_run("ppo", values, [], make_step(4))
    loss, batch, preparation = run.loss, run.batch, run.preparation
    assert isinstance(loss, ValueLoss)
    assert preparation is not None
    rows = list(range(len(batch.samples)))
    noise = 0.3 * np.random.default_rng(1).standard_normal(len(batch.mask))
    present = torch.tensor(run.step.values + noise, requires_grad=True)
    index = batch.padded(np.arange(len(batch.mask)), rows)
    terms = loss.value_terms(present[index], *preparation.value_targets(rows, present)).terms
    total = terms.sum() / run.normaliser
    total.backward()

    def reference(flat: np.ndarray) -> float:
        groups = plain_groups(run, run.step.policy)
        settings_ = loss.settings.model_dump()  # type: ignore[attr-defined]
        settings_["kl_in"] = "reward"
        references.set_gae(groups, settings_)
        trained = [batch.flat_index([row]) for row in rows]
        lists = [flat[places[batch.mask[places]]].tolist() for places in trained]
        return references.value_loss(groups, settings_, lists)

    start = present.detach().numpy()
    assert float(total.detach()) == pytest.approx(reference(start), rel=1e-5)
    assert present.grad is not None
    for place in np.flatnonzero(batch.mask)[::7]:
        sides = [
            reference(start + shift * (np.arange(len(start)) == place)) for shift in (-1e-5, 1e-5)
        ]
        slope = (sides[1] - sides[0]) / 2e-5
        assert float(present.grad[place]) == pytest.approx(slope, rel=1e-4, abs=1e-8)


# ---- corrections and their refusals


@pytest.mark.parametrize(
    ("name", "corrections", "found"),
    [
        ("online_dpo", [{"name": "tis"}], "no ratio to the policy that sampled"),
        ("vargrad", [{"name": "sequence_mask"}], "no ratio"),
        ("topr", [{"name": "tis"}], "would correct twice"),
        ("grpo", [{"name": "tis"}, {"name": "masked_is"}], "more than once"),
        ("grpo", [{"name": "tis"}, {"name": "tis"}], "more than once"),
    ],
)
def test_corrections_that_do_not_fit_are_refused(
    name: str, corrections: list[dict[str, Any]], found: str
) -> None:
    with pytest.raises(ValueError, match=found):
        check_corrections(settings_of(name), [correction(**c) for c in corrections])


def test_corrections_of_on_policy_samples_change_nothing() -> None:
    step = make_step(6)
    behaviour = iter(
        np.split(
            step.old, np.cumsum([len(s.token_ids) for g in step.groups for s in g.completions])
        )
    )
    groups = [
        replace(
            g,
            completions=tuple(
                replace(s, behaviour_logprobs=next(behaviour)) for s in g.completions
            ),
        )
        for g in step.groups
    ]
    fresh = replace(step, groups=groups)
    plain = make_run("grpo", {}, [], fresh).total()
    for chosen in CORRECTIONS:
        torch.testing.assert_close(make_run("grpo", {}, chosen, fresh).total(), plain)


# ---- a loss of one's own


class HalfOfDPO(OnlineDPOLoss):
    """A user's loss."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Half of it."""
        output = super().__call__(inputs)
        return replace(output, terms=output.terms / 2)


def test_a_loss_of_your_own_by_its_path() -> None:
    path = "tests.unit.learner.test_losses:HalfOfDPO"
    custom = build_loss(
        CustomLoss(name="custom", path=path, params={"beta": 0.7}), max_tokens=MAX_TOKENS
    )
    step = make_step(1)
    whole = Run(build("online_dpo", {"beta": 0.7}), step)
    torch.testing.assert_close(Run(custom, step).total(), whole.total() / 2)


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
        build_loss(CustomLoss(name="custom", path=path, params=params), max_tokens=8)


def test_a_custom_loss_applies_its_own_corrections() -> None:
    settings_ = CustomLoss(name="custom", path="services.learner.losses.online_dpo:OnlineDPOLoss")
    with pytest.raises(ConfigError, match="applies its own"):
        build_loss(settings_, corrections=[correction("tis")], max_tokens=8)
