"""Variational sequence-level soft policy optimization: a smooth weight on the ratio of whole completions.

    W = exp sum_t (log pi_theta - log mu)
    phi = sg( W^k exp(lambda (1 - W)) )
    mean over tokens of -phi A log pi_theta

k and lambda are those of the advantage's sign. phi is 1 at W = 1 and falls to 0 on both sides.

Source: arXiv 2602.10693. Legend: B rows of a micro-batch, T positions.
"""

from __future__ import annotations

import math

import torch

from offbeat.config.losses import VESPO
from services.learner.losses.base import MAX_LOG_RATIO, LossInputs
from services.learner.losses.grpo import GroupScaledLoss
from services.learner.losses.policy_gradient import Surrogate, row_values

# A ratio below this weighs nothing, and its log must stay finite.
LEAST_LOG_RATIO = math.log(1e-8)


class VESPOLoss(GroupScaledLoss):
    """See the module; terms (B, T). clip_fraction is the share of completions that weigh less than half."""

    reduction = "token"
    settings: VESPO

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """-phi A log pi, (B, T)."""
        assert inputs.advantages_B_T is not None
        given = self.settings
        log_ratio_B_T = inputs.logprobs_B_T - inputs.behaviour_logprobs_B_T
        log_ratio_B_T = log_ratio_B_T.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_ratio_B = log_ratio_B_T.sum(dim=-1).clamp(LEAST_LOG_RATIO, MAX_LOG_RATIO)
        good_B = row_values(inputs.advantages_B_T, inputs.mask_B_T) >= 0
        power_B = torch.where(good_B, given.k_positive, given.k_negative)
        decay_B = torch.where(good_B, given.lambda_positive, given.lambda_negative)
        # In logs: W^k alone would overflow where the exponential makes it vanish.
        phi_B = (power_B * log_ratio_B + decay_B * (1 - log_ratio_B.exp())).exp()
        terms_B_T = -phi_B[:, None] * inputs.advantages_B_T * inputs.logprobs_B_T
        return Surrogate(terms_B_T, phi_B < 0.5)
