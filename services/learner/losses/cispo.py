"""Clipped importance-sampling policy optimization: the ratio is capped and detached, no token loses its gradient.

    mean over tokens of -sg(min(r_t, ratio_max)) A log pi_theta

Source: arXiv 2506.13585 (MiniMax-M1), eq. 4 and 5, with only the upper cap, as there; ratio_max 5 is
ScaleRL's (arXiv 2510.13786) and what TRL clamps at. Legend: B rows of a micro-batch, T positions.
"""

from __future__ import annotations

from offbeat.config.losses import CISPO
from services.learner.losses.base import LossInputs
from services.learner.losses.grpo import GroupScaledLoss
from services.learner.losses.policy_gradient import Surrogate, token_ratio


class CISPOLoss(GroupScaledLoss):
    """See the module; terms (B, T)."""

    reduction = "token"
    settings: CISPO

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """-sg(min(r, ratio_max)) A log pi, (B, T)."""
        assert inputs.advantages_B_T is not None
        ratio = token_ratio(inputs).detach()
        weights = ratio.clamp(max=self.settings.ratio_max)
        terms = -weights * inputs.advantages_B_T * inputs.logprobs_B_T
        return Surrogate(terms, ratio > self.settings.ratio_max)
