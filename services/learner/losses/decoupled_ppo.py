"""Decoupled PPO: the proximal policy that clips is not the behaviour policy that sampled.

    mean over tokens of (pi_old / mu) max(-A u_t, -A clip(u_t, 1 - clip_low, 1 + clip_high))

with u_t = pi_theta / pi_old, and pi_old recomputed at the step's start. Tokens whose weight
pi_old / mu is above `weight_cap` are left out.

Source: arXiv 2505.24298 (AReaL), eq. 5, with the advantage of GRPO.
Legend: B rows of a micro-batch, T positions, N tokens of whole groups.
"""

from __future__ import annotations

import numpy as np

from offbeat.config.losses import DecoupledPPO
from services.learner.losses.base import Constants, LossInputs
from services.learner.losses.corrections import bounded_exp, log_weights
from services.learner.losses.grpo import GroupScaledLoss
from services.learner.losses.policy_gradient import Surrogate, clipped, token_ratio


class DecoupledPPOLoss(GroupScaledLoss):
    """See the module; terms (B, T)."""

    reduction = "token"
    settings: DecoupledPPO

    def weights(self, constants: Constants, advantages_N: np.ndarray) -> np.ndarray:
        """pi_old / mu of every token, 0 above the cap, times the corrections' factor."""
        weights = bounded_exp(log_weights(constants))
        if self.settings.weight_cap is not None:
            weights = np.where(weights <= self.settings.weight_cap, weights, 0.0)
        corrections = super().weights(constants, advantages_N)
        return weights if corrections is None else weights * corrections

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped terms, (B, T)."""
        assert inputs.advantages_B_T is not None
        low, high = self.settings.clip_low, self.settings.clip_high
        return clipped(token_ratio(inputs), inputs.advantages_B_T, low, high)
