"""What the policy-gradient losses share: advantages, corrections, KL, and how tokens become terms.

A loss of this family is a file with a subclass of `PolicyGradientLoss`: an advantage, a surrogate,
and class attributes.

    sum over terms of  w · surrogate(ratio, A) [+ kl_coef · k3]

with A from constants (`advantages`), w from the corrections, k3 = r - log r - 1 for r = pi_ref / pi.

Legend: B rows of a micro-batch, T completion positions; R rows of whole groups, N their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from offbeat.config.losses import CorrectionSettings, PolicyGradient
from services.learner.losses.advantages import processed_rewards, whitened_over_tokens
from services.learner.losses.base import (
    Constants,
    LossInputs,
    LossOutput,
    Normaliser,
    exp_ratio,
    masked_mean,
)
from services.learner.losses.corrections import correction_weights

# How a row's tokens become its term, and what the update's sum of terms is divided by:
#   token          every token is a term; over the trained tokens of the mini-batch
#   sample_mean    mean over the row's tokens; over samples
#   sample_sum     sum over the row's tokens; over samples
#   constant       sum over the row's tokens / a constant length; over samples
Reduction = Literal["token", "sample_mean", "sample_sum", "constant"]


@dataclass(frozen=True)
class Surrogate:
    """`terms`: per token (B, T) or per row (B,); `held_back`: where clipping, capping or masking acts."""

    terms: Tensor
    held_back: Tensor | None = None


class PolicyGradientLoss:
    """See the module. Subclasses give `row_advantages` and `surrogate`.

    `reduction` is how tokens become terms. The metrics: advantage/mean and advantage/square per
    sample, correction/mean and correction/zero_fraction per token, clip_fraction.
    """

    reduction: ClassVar[Reduction] = "token"
    clips: ClassVar[bool] = True
    needs_old = True
    # A statistic of the loss's own over a whole mini-batch that depends on pi_old.
    whole_batch: ClassVar[bool] = False

    def __init__(
        self,
        settings: PolicyGradient,
        *,
        corrections: Sequence[CorrectionSettings] = (),
        max_tokens: int,
    ) -> None:
        self.settings = settings
        self.corrections = tuple(corrections)
        self.max_tokens = max_tokens
        self.needs_reference = settings.kl_coef > 0
        self.normalise_by: Normaliser = "token" if self.reduction == "token" else "sample"
        self.advantages_use_old = settings.kl_in_reward
        whitens = settings.whiten_rewards or settings.whiten_advantages or self.scales_by_batch
        self.old_first = self.whole_batch or (whitens and self.advantages_use_old)
        self.metric_names: tuple[str, ...] = ("advantage/mean", "advantage/square")
        if self.clips:
            self.metric_names += ("clip_fraction",)
        if self.corrections:
            self.metric_names += ("correction/mean", "correction/zero_fraction")

    # ---- what subclasses give

    def row_advantages(self, rewards_R: np.ndarray, constants: Constants) -> np.ndarray:
        """Advantages (R,) from processed rewards (R,)."""
        raise NotImplementedError

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """Terms without correction and KL; the inputs are 0 at untrained tokens."""
        raise NotImplementedError

    def shaping(self, constants: Constants) -> np.ndarray | None:
        """What is added to the rewards, (R,)."""
        return None

    @property
    def constant_length(self) -> int:
        """What the reduction `constant` divides by."""
        return self.max_tokens

    @property
    def scales_by_batch(self) -> bool:
        """Whether advantages are divided by a deviation over the whole step."""
        return getattr(self.settings, "scale", "none") == "batch"

    @property
    def equal_rewards_matter(self) -> bool:
        """Whether a group of equal rewards has a gradient."""
        return self.needs_reference or self.settings.whiten_advantages

    # ---- the port

    def units(self, rewards_K: np.ndarray) -> list[tuple[int, ...]]:
        """The whole group: the advantage of one completion depends on the others."""
        if not self.equal_rewards_matter and (rewards_K == rewards_K[0]).all():
            return []
        return [tuple(range(len(rewards_K)))]

    def advantages(self, constants: Constants) -> np.ndarray:
        """Advantage of every token, (N,)."""
        rewards = processed_rewards(self.settings, constants, self.shaping(constants))
        advantages = constants.over_tokens(self.row_advantages(rewards, constants))
        if self.settings.whiten_advantages:
            advantages = whitened_over_tokens(advantages, constants.mask)
        return advantages

    def weights(self, constants: Constants, advantages_N: np.ndarray) -> np.ndarray | None:
        """The corrections' factor of every token, (N,)."""
        return correction_weights(self.corrections, constants, advantages_N)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Terms (B, T) for the reduction `token`, else (B,)."""
        assert inputs.advantages_B_T is not None
        inputs = without_padding(inputs)
        found = self.surrogate(inputs)
        terms = found.terms
        if inputs.weights_B_T is not None:
            per_row = terms.dim() == 1
            mask = inputs.mask_B_T
            # A row's term takes the mean of its tokens' weights: the row's own where all are equal.
            terms = terms * (
                masked_mean(inputs.weights_B_T, mask) if per_row else inputs.weights_B_T
            )
        terms = self.reduce(terms, inputs.mask_B_T)
        if self.settings.kl_in_loss:
            kl_B_T = torch.where(inputs.mask_B_T, k3(inputs), 0.0)
            terms = terms + self.settings.kl_coef * self.reduce(kl_B_T, inputs.mask_B_T)
        return LossOutput(terms, self._metrics(inputs, found))

    def reduce(self, terms: Tensor, mask_B_T: Tensor) -> Tensor:
        """Terms per token (B, T) to terms of the loss; terms per row (B,) stay as they are."""
        if terms.dim() == 1 or self.reduction == "token":
            return terms
        sums_B = terms.sum(dim=-1)
        if self.reduction == "sample_mean":
            return sums_B / mask_B_T.sum(dim=-1).clamp(min=1)
        return sums_B / self.constant_length if self.reduction == "constant" else sums_B

    def _metrics(self, inputs: LossInputs, found: Surrogate) -> dict[str, Tensor]:
        assert inputs.advantages_B_T is not None
        mask = inputs.mask_B_T
        advantages_B = masked_mean(inputs.advantages_B_T, mask)
        squares_B = masked_mean(inputs.advantages_B_T**2, mask)
        metrics = {"advantage/mean": advantages_B, "advantage/square": squares_B}
        if found.held_back is not None:
            held = found.held_back
            metrics["clip_fraction"] = held if held.dim() == 1 else held[mask]
        if self.corrections and inputs.weights_B_T is not None:
            weights = inputs.weights_B_T[mask]
            metrics["correction/mean"] = weights
            metrics["correction/zero_fraction"] = weights == 0
        return metrics


def without_padding(inputs: LossInputs) -> LossInputs:
    """The same with 0 at untrained tokens, where anything may stand."""
    mask = inputs.mask_B_T
    per_token = {
        field.name: torch.where(mask, value, 0.0)
        for field in fields(inputs)
        if field.name.endswith("_B_T") and field.name != "mask_B_T"
        if (value := getattr(inputs, field.name)) is not None
    }
    return replace(inputs, **per_token)


def token_ratio(inputs: LossInputs) -> Tensor:
    """pi_theta / pi_old per token, (B, T)."""
    return exp_ratio(inputs.logprobs_B_T - inputs.old_logprobs_B_T)


def k3(inputs: LossInputs) -> Tensor:
    """r - log r - 1 with r = pi_ref / pi_theta, (B, T): unbiased for the KL where pi_theta sampled; never negative."""
    assert inputs.reference_logprobs_B_T is not None
    difference_B_T = inputs.reference_logprobs_B_T - inputs.logprobs_B_T
    # Only the exponential can overflow; the straight part keeps pulling back however far it is.
    return exp_ratio(difference_B_T) - difference_B_T - 1


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), of the shape of both."""
    terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(min=1 - low, max=1 + high))
    beyond = torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - low)
    return Surrogate(terms, beyond & (advantages != 0))


def row_values(values_B_T: Tensor, mask_B_T: Tensor) -> Tensor:
    """The value that all trained tokens of a row share, (B,)."""
    return masked_mean(values_B_T, mask_B_T)


def sequence_ratio(inputs: LossInputs) -> Tensor:
    """pi_theta / pi_old of whole rows, (B,)."""
    log_ratio_B = (inputs.logprobs_B_T - inputs.old_logprobs_B_T).sum(dim=-1)
    return exp_ratio(log_ratio_B)
