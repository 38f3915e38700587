"""The port of the losses: what a loss is given, what it returns, what it promises.

Legend of the shape suffixes: B samples of a micro-batch, U units, K completions of a group,
T completion positions (right-padded). All log-probs are natural logs at the sampling temperature,
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

# A ratio's exponent is cut to this range before exp: exp(20) = 4.9e8 is far from float32's
# overflow, and far past any ratio that carries information.
MAX_LOG_RATIO = 20.0


# What the sum of an update's terms is divided by.
Normaliser = Literal["group", "sample", "token"]


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch, units one after the other; the rows of a unit stand together, in its order.

    `logprobs_B_T` is the current policy and carries the gradient; the other log-probs are
    constants. `mask_B_T` is True where a token is trained on; what stands elsewhere means nothing.
    `reference_logprobs_B_T` is None when the loss does not need it. `unit_sizes` add up to B.
    """

    logprobs_B_T: Tensor
    old_logprobs_B_T: Tensor
    behaviour_logprobs_B_T: Tensor
    reference_logprobs_B_T: Tensor | None
    mask_B_T: Tensor
    rewards_B: Tensor
    unit_sizes: tuple[int, ...]


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns for a micro-batch.

    `terms`: loss terms of any shape, not divided by the normaliser; the trainer adds them up.
    `metrics`: for each of the loss's `metric_names`, values of any shape; the mean over all values
    of a step is logged.
    """

    terms: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Loss(Protocol):
    """A loss. It has no state: the same inputs give the same terms.

    The loss of an update is the sum of all terms over the number of groups, samples, or trained
    tokens of the whole mini-batch (`normalise_by`), groups without units included, over all ranks
    and micro-batches.
    """

    needs_reference: bool
    needs_old: bool
    normalise_by: Normaliser
    metric_names: tuple[str, ...]

    def units(self, rewards_K: np.ndarray) -> Sequence[tuple[int, ...]]:
        """Which completions of a group are run through the model, and which of them together.

        Each unit is a tuple of indices into the group. No unit: the group has no gradient (it
        still counts in the normaliser).
        """
        ...

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The terms of a micro-batch. A term may depend on the rows of its own unit only."""
        ...


def sequence_sums(values_B_T: Tensor, mask_B_T: Tensor) -> Tensor:
    """Sum over the trained tokens of each row, (B,). The values elsewhere may be anything."""
    return torch.where(mask_B_T, values_B_T, 0.0).sum(dim=-1)


def sequence_log_ratio(inputs: LossInputs) -> Tensor:
    """log of the sequence ratio pi_theta / pi_old, (B,), cut to ±MAX_LOG_RATIO."""
    difference_B_T = inputs.logprobs_B_T - inputs.old_logprobs_B_T
    return sequence_sums(difference_B_T, inputs.mask_B_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
