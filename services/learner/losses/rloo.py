"""REINFORCE with a leave-one-out baseline, plain and proximal.

Sources: arXiv 2402.14740 (RLOO); the proximal variant, PPO's clipping on the ratio of whole
sequences, is the one of arXiv 2410.18252.

Legend: B samples of a micro-batch (whole groups one after the other), U groups, K completions of a
group, T completion positions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.learner.losses.base import (
    LossInputs,
    LossOutput,
    Normaliser,
    sequence_log_ratio,
    sequence_sums,
)


def leave_one_out(returns_B: Tensor, group_sizes: tuple[int, ...]) -> Tensor:
    """A_k = R_k - mean of R_j over the other j of the group, (B,). A group of one has advantage 0."""
    sizes_U = torch.tensor(group_sizes, device=returns_B.device)
    group_B = torch.repeat_interleave(
        torch.arange(len(group_sizes), device=returns_B.device), sizes_U
    )
    sums_U = returns_B.new_zeros(len(group_sizes)).index_add(0, group_B, returns_B)
    sizes_B = sizes_U[group_B]
    # R_k - (S - R_k) / (K - 1)  =  (K R_k - S) / (K - 1), without the cancellation for equal returns
    advantages_B = (sizes_B * returns_B - sums_U[group_B]) / (sizes_B - 1).clamp(min=1)
    return torch.where(sizes_B > 1, advantages_B, 0.0)


def rloo_terms(log_ratio_B: Tensor, advantages_B: Tensor) -> Tensor:
    """-A exp(log ratio), (B,). Where the ratio is 1 its gradient is REINFORCE's, -A grad log pi."""
    return -advantages_B * log_ratio_B.exp()


def proximal_terms(log_ratio_B: Tensor, advantages_B: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - clip, 1 + clip)) and where the clipping holds, both (B,)."""
    ratio_B = log_ratio_B.exp()
    clipped_B = ratio_B.clamp(1 - clip, 1 + clip)
    terms_B = torch.maximum(-advantages_B * ratio_B, -advantages_B * clipped_B)
    beyond_B = torch.where(advantages_B > 0, ratio_B > 1 + clip, ratio_B < 1 - clip)
    return terms_B, beyond_B & (advantages_B != 0)


class RLOOLoss:
    """Mean over samples of -A r, with R_k = score_k - kl_coef sum_t (log pi_old - log pi_ref)."""

    needs_old = True
    normalise_by: Normaliser = "sample"
    metric_names: tuple[str, ...] = ()

    def __init__(self, kl_coef: float) -> None:
        self.kl_coef = kl_coef
        self.needs_reference = kl_coef > 0

    def units(self, rewards_K: np.ndarray) -> list[tuple[int, ...]]:
        """The whole group: the baseline of one completion is made of the others."""
        if not self.needs_reference and (rewards_K == rewards_K[0]).all():
            return []
        return [tuple(range(len(rewards_K)))]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Terms (B,)."""
        return LossOutput(rloo_terms(sequence_log_ratio(inputs), self.advantages(inputs)))

    def advantages(self, inputs: LossInputs) -> Tensor:
        """Leave-one-out advantages of the returns, constants, (B,)."""
        returns_B = inputs.rewards_B
        if inputs.reference_logprobs_B_T is not None:
            kl_B = sequence_sums(
                inputs.old_logprobs_B_T - inputs.reference_logprobs_B_T, inputs.mask_B_T
            )
            returns_B = returns_B - self.kl_coef * kl_B
        return leave_one_out(returns_B.detach(), inputs.unit_sizes)


class ProximalRLOOLoss(RLOOLoss):
    """RLOO with PPO's clipping on the sequence ratio to the policy at the step's start."""

    metric_names: tuple[str, ...] = ("clip_fraction",)

    def __init__(self, kl_coef: float, clip: float) -> None:
        super().__init__(kl_coef)
        self.clip = clip

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Terms (B,)."""
        terms_B, clipped_B = proximal_terms(
            sequence_log_ratio(inputs), self.advantages(inputs), self.clip
        )
        return LossOutput(terms_B, {"clip_fraction": clipped_B})
