"""Contrastive policy gradient: right off-policy without importance weights.

    R_b(y) = R(y) - beta sum_t (log pi_theta - log pi_ref),  detached
    mean over groups of the mean over pairs (y, y') of
        -[ (R_b(y) - R_b(y')) log pi_theta(y) + (R_b(y') - R_b(y)) log pi_theta(y') ]

Source: arXiv 2406.19185, eq. 8, over all pairs of a group of k. Legend: B rows of a micro-batch
(whole groups one after the other), U groups, K completions of a group.
"""

from __future__ import annotations

import numpy as np
import torch

from services.learner.losses.base import LossInputs, LossOutput, Normaliser, sequence_sums


class CoPGLoss:
    """See the module; terms (U,)."""

    needs_old = False
    normalise_by: Normaliser = "group"
    metric_names: tuple[str, ...] = ("copg_contrast",)

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.needs_reference = beta > 0

    def units(self, rewards_K: np.ndarray) -> list[tuple[int, ...]]:
        """The whole group; none when neither rewards nor reference make a difference."""
        if not self.needs_reference and (rewards_K == rewards_K[0]).all():
            return []
        return [tuple(range(len(rewards_K)))]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Terms (U,)."""
        logprobs_B = sequence_sums(inputs.logprobs_B_T, inputs.mask_B_T)
        returns_B = inputs.rewards_B
        if inputs.reference_logprobs_B_T is not None and self.needs_reference:
            reference_B = sequence_sums(inputs.reference_logprobs_B_T, inputs.mask_B_T)
            returns_B = returns_B - self.beta * (logprobs_B.detach() - reference_B)
        terms, contrasts = [], []
        for returns_K, logprobs_K in zip(
            returns_B.split(inputs.unit_sizes), logprobs_B.split(inputs.unit_sizes), strict=True
        ):
            # Over all pairs: completion k gets (2 / (K (K - 1))) sum over j of (R_k - R_j).
            size = len(returns_K)
            contrast_K = (returns_K[:, None] - returns_K[None, :]).sum(dim=1)
            terms.append(-(contrast_K * logprobs_K).sum() * 2 / max(1, size * (size - 1)))
            contrasts.append(contrast_K.abs() / max(1, size - 1))
        return LossOutput(torch.stack(terms), {"copg_contrast": torch.cat(contrasts)})
