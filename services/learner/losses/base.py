"""The port of the losses: what a loss is given, what it returns, what it promises.

Legend of the shape suffixes: B samples of a micro-batch, U units, K completions of a group,
T completion positions (right-padded); R rows of whole groups, N tokens of all of them, row after row
without padding. All log-probs are natural logs at the sampling temperature, float32.
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
    `advantages_B_T` and `weights_B_T` are what `PreparedLoss` computed; None for other losses.
    """

    logprobs_B_T: Tensor
    old_logprobs_B_T: Tensor
    behaviour_logprobs_B_T: Tensor
    reference_logprobs_B_T: Tensor | None
    mask_B_T: Tensor
    rewards_B: Tensor
    unit_sizes: tuple[int, ...]
    advantages_B_T: Tensor | None = None
    weights_B_T: Tensor | None = None


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


@dataclass(frozen=True, eq=False)
class Constants:
    """What is known of whole groups before an update, none of it with a gradient.

    `rewards` float64 (R,), `lengths` int64 (R,), `has_eos` bool (R,); `group_sizes` add up to R.
    Flat, (N,): `mask` bool, True where a token is trained on; `behaviour`, `old`, `reference`
    float32 log-probs, `values` float32. What is not known, or not needed, is None.
    """

    rewards: np.ndarray
    lengths: np.ndarray
    has_eos: np.ndarray
    group_sizes: tuple[int, ...]
    mask: np.ndarray
    behaviour: np.ndarray
    old: np.ndarray | None = None
    reference: np.ndarray | None = None
    values: np.ndarray | None = None

    def over_tokens(self, values_R: np.ndarray) -> np.ndarray:
        """Each row's value at each of its tokens, (N,)."""
        return np.repeat(values_R, self.lengths)

    def row_sums(self, values_N: np.ndarray) -> np.ndarray:
        """Sum over each row's trained tokens, float64 (R,). The values elsewhere may be anything."""
        if not len(self.lengths):
            return np.zeros(0)
        starts = np.cumsum(self.lengths) - self.lengths
        return np.add.reduceat(np.where(self.mask, values_N.astype(np.float64), 0.0), starts)

    def row_means(self, values_N: np.ndarray) -> np.ndarray:
        """Mean over each row's trained tokens, float64 (R,); 0 for a row without any."""
        counts = self.row_sums(np.ones(len(self.mask)))
        return self.row_sums(values_N) / np.maximum(counts, 1.0)

    @property
    def sizes(self) -> np.ndarray:
        """Size of each row's group, int64 (R,)."""
        sizes = np.array(self.group_sizes, np.int64)
        return np.repeat(sizes, sizes)

    def group_firsts(self, values_R: np.ndarray) -> np.ndarray:
        """The value of the first row of each row's group, (R,)."""
        sizes = np.array(self.group_sizes, np.int64)
        return np.repeat(values_R[np.cumsum(sizes) - sizes], sizes)

    def group_sums(self, values_R: np.ndarray) -> np.ndarray:
        """Sum over each row's group, at each row, (R,)."""
        sizes = np.array(self.group_sizes, np.int64)
        groups = np.repeat(np.arange(len(sizes)), sizes)
        return np.bincount(groups, values_R, len(sizes))[groups]


@runtime_checkable
class PreparedLoss(Loss, Protocol):
    """A loss with advantages and weights that are computed before its terms, from constants alone.

    Every rank has the constants of the whole step, so every rank computes statistics over all of
    it (a deviation, a quantile) by itself, without communication, and gets the same numbers however
    the step is cut. Its `units` say which rows the advantages are computed from together; its terms
    are computed row by row.

    The trainer calls `advantages` once per step with all its groups, and `weights` once per update
    with the rows of its mini-batch that are run. Where pi_old is the policy of the update itself,
    known only in its forward pass, both are called for each micro-batch instead, unless `old_first`
    asks for a pass of its own.

    `old_first`: pi_old must be known before the first update, because a statistic over more than a
    group depends on it. `advantages_use_old`: the advantages depend on pi_old.
    """

    old_first: bool
    advantages_use_old: bool

    def advantages(self, constants: Constants) -> np.ndarray:
        """Advantage of every token, float64 (N,)."""
        ...

    def weights(self, constants: Constants, advantages_N: np.ndarray) -> np.ndarray | None:
        """Factor of every token's term, float64 (N,); None: 1 everywhere."""
        ...


@runtime_checkable
class ValueLoss(PreparedLoss, Protocol):
    """A loss with a critic. Its `Constants` have values, and its units are single rows.

    `shares_policy`: the critic is a head on the policy, so that its terms belong to the policy's loss.
    """

    value_metric_names: tuple[str, ...]

    @property
    def shares_policy(self) -> bool:
        """See the class."""
        ...

    def returns(self, constants: Constants) -> np.ndarray:
        """What the critic's value of every token is drawn to, float64 (N,)."""
        ...

    def value_terms(
        self, values_B_T: Tensor, old_B_T: Tensor, returns_B_T: Tensor, mask_B_T: Tensor
    ) -> LossOutput:
        """The critic's terms, over the same normaliser as the policy's; `old`: values at the step's start."""
        ...


def sequence_sums(values_B_T: Tensor, mask_B_T: Tensor) -> Tensor:
    """Sum over the trained tokens of each row, (B,). The values elsewhere may be anything."""
    return torch.where(mask_B_T, values_B_T, 0.0).sum(dim=-1)


def masked_mean(values_B_T: Tensor, mask_B_T: Tensor) -> Tensor:
    """Mean over the trained tokens of each row, (B,); 0 for a row without any."""
    return sequence_sums(values_B_T, mask_B_T) / mask_B_T.sum(dim=-1).clamp(min=1)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio that is cut to ±MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
