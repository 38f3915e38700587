"""Group relative policy optimization.

    A_k = (R_k - mean of the group) / (deviation + 1e-4)
    mean over samples of (1 / |y|) sum_t [ max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)) ]
    + kl_coef k3, reduced alike                                     (kl_in: loss)

with r_t = pi_theta / pi_old of a token. `scale` chooses the deviation: of the group, of the step, none.

Source: arXiv 2402.03300, eq. 3; deviations are unbiased and kl_coef is 0 by default, as in TRL.
Legend: B rows of a micro-batch, T positions, R rows of whole groups.
"""

from __future__ import annotations

import numpy as np

from offbeat.config.losses import DAPO, GRPO, DrGRPO, GroupScaled
from services.learner.losses.advantages import group_scaled
from services.learner.losses.base import Constants, LossInputs
from services.learner.losses.policy_gradient import (
    PolicyGradientLoss,
    Surrogate,
    clipped,
    token_ratio,
)


class GroupScaledLoss(PolicyGradientLoss):
    """Losses with the advantage of GRPO."""

    settings: GroupScaled

    def row_advantages(self, rewards_R: np.ndarray, constants: Constants) -> np.ndarray:
        """(R - group mean) / (deviation + 1e-4)."""
        return group_scaled(rewards_R, constants, self.settings.scale)


class ClippedTokens:
    """The surrogate of GRPO, Dr. GRPO and DAPO: clipping on the ratio of a token."""

    settings: GRPO | DrGRPO | DAPO

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped terms, (B, T)."""
        assert inputs.advantages_B_T is not None
        low, high = self.settings.clip_low, self.settings.clip_high
        return clipped(token_ratio(inputs), inputs.advantages_B_T, low, high)


class GRPOLoss(ClippedTokens, GroupScaledLoss):
    """See the module; terms (B,)."""

    reduction = "sample_mean"
    settings: GRPO
