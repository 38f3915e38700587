"""REINFORCE with a leave-one-out baseline, plain and proximal.

    R_k = score_k - kl_coef sum_t (log pi_old - log pi_ref)        (kl_in: reward)
    A_k = R_k - mean of R_j over the other j of the group
    plain:     mean over samples of -A r
    proximal:  mean over samples of max(-A r, -A clip(r, 1 - clip, 1 + clip))

with r = pi_theta / pi_old of the whole completion. Where r is 1 the gradient is REINFORCE's.

Sources: arXiv 2402.14740 (RLOO); the proximal variant, PPO's clipping on the ratio of whole
sequences, is the one of arXiv 2410.18252. Legend: B rows of a micro-batch, R rows of whole groups.
"""

from __future__ import annotations

import numpy as np

from offbeat.config.losses import ProximalRLOO
from services.learner.losses.advantages import leave_one_out
from services.learner.losses.base import Constants, LossInputs
from services.learner.losses.policy_gradient import (
    PolicyGradientLoss,
    Surrogate,
    clipped,
    row_values,
    sequence_ratio,
)


class RLOOLoss(PolicyGradientLoss):
    """See the module; terms (B,)."""

    reduction = "sample_sum"
    clips = False

    def row_advantages(self, rewards_R: np.ndarray, constants: Constants) -> np.ndarray:
        """Leave-one-out advantages."""
        return leave_one_out(rewards_R, constants)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """-A r, (B,)."""
        assert inputs.advantages_B_T is not None
        return Surrogate(
            -row_values(inputs.advantages_B_T, inputs.mask_B_T) * sequence_ratio(inputs)
        )


class ProximalRLOOLoss(RLOOLoss):
    """RLOO with PPO's clipping on the sequence ratio to the policy at the step's start."""

    clips = True
    settings: ProximalRLOO

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped terms, (B,)."""
        assert inputs.advantages_B_T is not None
        advantages_B = row_values(inputs.advantages_B_T, inputs.mask_B_T)
        return clipped(sequence_ratio(inputs), advantages_B, self.settings.clip, self.settings.clip)
