"""GRPO done right: without the division by a deviation and by each completion's length.

    A_k = R_k - mean of the group
    mean over samples of (1 / length) sum_t max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high))

with a constant `length`, sampling.max_tokens by default.

Source: arXiv 2503.20783. Legend: B rows of a micro-batch, R rows of whole groups.
"""

from __future__ import annotations

import numpy as np

from offbeat.config.losses import DrGRPO
from services.learner.losses.advantages import centred
from services.learner.losses.base import Constants
from services.learner.losses.grpo import ClippedTokens
from services.learner.losses.policy_gradient import PolicyGradientLoss


class DrGRPOLoss(ClippedTokens, PolicyGradientLoss):
    """See the module; terms (B,)."""

    reduction = "constant"
    settings: DrGRPO

    @property
    def constant_length(self) -> int:
        """What sums over tokens are divided by."""
        return self.settings.length or self.max_tokens

    def row_advantages(self, rewards_R: np.ndarray, constants: Constants) -> np.ndarray:
        """R - group mean."""
        return centred(rewards_R, constants)
