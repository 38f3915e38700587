"""Random steps for tests of the losses, and the losses run on them through the trainer's own preparation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from pydantic import TypeAdapter

from offbeat.config.losses import (
    CorrectionSettings,
    CustomLoss,
    LossBase,
    LossSettings,
    PolicyGradient,
)
from services.learner.batching import Group, Sample, StepBatch, Unit, rows_in
from services.learner.losses import Loss, LossInputs, PreparedLoss, build_loss
from services.learner.preparation import Preparation

MAX_TOKENS = 9
_LOSS: TypeAdapter[Any] = TypeAdapter(LossSettings)
_CORRECTION: TypeAdapter[Any] = TypeAdapter(CorrectionSettings)

FAMILIES: dict[str, type[LossBase]] = {
    get_args(family.model_fields["name"].annotation)[0]: family
    for family in get_args(get_args(LossSettings)[0])
    if family is not CustomLoss
}
"""Every registered loss but `custom`, by name."""


def settings_of(name: str, **values: Any) -> Any:
    """Settings of a loss."""
    return _LOSS.validate_python({"name": name, **values})


def correction(name: str, **values: Any) -> Any:
    """Settings of a correction."""
    return _CORRECTION.validate_python({"name": name, **values})


def is_policy_gradient(name: str) -> bool:
    """Whether the loss has an advantage."""
    return issubclass(FAMILIES[name], PolicyGradient)


@dataclass
class Step:
    """Groups and the log-probs of all policies, flat in the order of `StepBatch`; float32 values."""

    groups: list[Group]
    policy: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    values: np.ndarray


def make_step(
    seed: int, sizes: Sequence[int] = (4, 2, 3, 4), spread: float = 0.3, width: int = MAX_TOKENS
) -> Step:
    """Unequal lengths, one-token completions, holes in masks, ties, one group of equal rewards, missing ends.

    `spread`: deviation of the log-probs of the policies from each other.
    """
    generator = np.random.default_rng(seed)
    groups = []
    for ordinal, size in enumerate(sizes):
        samples = []
        for place in range(size):
            length = 1 if place == 1 else int(generator.integers(1, width + 1))
            mask = generator.random(length) < 0.7
            mask[0] = True
            reward = 1.0 if ordinal == 1 else float(generator.integers(-1, 3))
            samples.append(
                Sample(
                    token_ids=generator.integers(1, 9, length).astype(np.int32),
                    behaviour_logprobs=(-1 - generator.random(length)).astype(np.float32),
                    reward=reward,
                    has_eos=bool(generator.random() < 0.7),
                    loss_mask=mask if place == 2 else None,
                )
            )
        groups.append(Group(ordinal, np.array([1, 2], np.int32), tuple(samples)))
    behaviour = np.concatenate([s.behaviour_logprobs for g in groups for s in g.completions])

    def near() -> np.ndarray:
        return (behaviour + spread * generator.standard_normal(len(behaviour))).astype(np.float32)

    policies = near(), near(), near()
    return Step(groups, *policies, generator.standard_normal(len(behaviour)).astype(np.float32))


def build(name: str, values: dict[str, Any] | None = None, corrections: Iterable[Any] = ()) -> Loss:
    """The loss of the settings."""
    settings = settings_of(name, **(values or {}))
    return build_loss(settings, corrections=tuple(corrections), max_tokens=MAX_TOKENS)


class Run:
    """A loss on a step, as the trainer runs it. `old_known` False: one update, pi_old is the policy itself."""

    def __init__(
        self, loss: Loss, step: Step, *, dtype: torch.dtype = torch.float64, old_known: bool = True
    ) -> None:
        self.loss, self.step, self.dtype = loss, step, dtype
        self.batch = StepBatch(step.groups, loss.units)
        self.old = step.old if old_known else None
        self.logprobs = torch.tensor(step.policy, dtype=dtype, requires_grad=True)
        known = self.old
        if known is None and isinstance(loss, PreparedLoss) and loss.old_first:
            known = step.policy  # what the trainer's pass of its own finds
        self.preparation = (
            Preparation(loss, self.batch, known, step.reference, step.values)
            if isinstance(loss, PreparedLoss)
            else None
        )
        units = [unit for group in self.batch.units for unit in group]
        self.units = units if self.preparation is None else self.preparation.begin_update(units)

    @property
    def normaliser(self) -> int:
        """What the sum of terms is divided by."""
        counts = {
            "group": len(self.step.groups),
            "sample": len(self.batch.samples),
            "token": int(self.batch.mask.sum()),
        }
        return counts[self.loss.normalise_by]

    def inputs(self, units: Sequence[Unit]) -> LossInputs:
        """A micro-batch; NaN stands where nothing may be read."""
        rows = rows_in(units)
        batch = self.batch
        mask = batch.padded(batch.mask, rows)
        inside = batch.padded(np.ones(len(batch.mask), np.bool_), rows)

        def padded(flat: np.ndarray) -> torch.Tensor:
            values = batch.padded(flat, rows).to(self.dtype)
            return torch.where(inside, values, float("nan"))

        index = batch.padded(np.arange(len(batch.mask)), rows)
        policy = torch.where(inside, self.logprobs[index], float("nan"))
        old = policy.detach() if self.old is None else padded(self.old)
        prepared = (None, None)
        if self.preparation is not None:
            clean = torch.where(inside, policy, 0.0)
            prepared = self.preparation.of(list(units), clean)
        return LossInputs(
            logprobs_B_T=policy,
            old_logprobs_B_T=old,
            behaviour_logprobs_B_T=padded(batch.behaviour),
            reference_logprobs_B_T=padded(self.step.reference)
            if self.loss.needs_reference
            else None,
            mask_B_T=mask,
            rewards_B=torch.tensor(batch.rewards[rows], dtype=self.dtype),
            unit_sizes=tuple(len(unit) for unit in units),
            advantages_B_T=prepared[0],
            weights_B_T=prepared[1],
        )

    def total(self, cut: Sequence[Sequence[Unit]] | None = None) -> torch.Tensor:
        """The loss of the update, from micro-batches; None: all units at once."""
        parts = [self.units] if cut is None else cut
        terms = [self.loss(self.inputs(part)).terms.sum() for part in parts if part]
        return torch.stack([self.logprobs.sum() * 0.0, *terms]).sum() / self.normaliser
