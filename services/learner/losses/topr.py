"""Tapered off-policy REINFORCE: good completions count in full, bad ones as far as the policy still makes them.

    R >= 0:  -R log pi_theta(y)
    R <  0:  -sg(min(pi_theta / mu, 1)) R log pi_theta(y)                mean over samples

with log-probs and ratio of whole completions. `baseline: group` takes the group's mean off the reward.

Source: arXiv 2503.14286, eq. 8. Legend: B rows of a micro-batch, R rows of whole groups.
"""

from __future__ import annotations

import numpy as np
import torch

from offbeat.config.losses import TOPR
from services.learner.losses.advantages import centred
from services.learner.losses.base import Constants, LossInputs, exp_ratio
from services.learner.losses.policy_gradient import PolicyGradientLoss, Surrogate, row_values


class TOPRLoss(PolicyGradientLoss):
    """See the module; terms (B,)."""

    reduction = "sample_sum"
    settings: TOPR

    @property
    def equal_rewards_matter(self) -> bool:
        """Without a baseline the reward itself is the advantage."""
        return self.settings.baseline == "none" or super().equal_rewards_matter

    def row_advantages(self, rewards_R: np.ndarray, constants: Constants) -> np.ndarray:
        """The rewards, less the group's mean where the settings say so."""
        return rewards_R if self.settings.baseline == "none" else centred(rewards_R, constants)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The tapered terms, (B,)."""
        assert inputs.advantages_B_T is not None
        rewards_B = row_values(inputs.advantages_B_T, inputs.mask_B_T)
        log_ratio_B_T = inputs.logprobs_B_T - inputs.behaviour_logprobs_B_T
        ratio_B = exp_ratio(log_ratio_B_T.sum(dim=-1)).detach()
        taper_B = torch.where(rewards_B < 0, ratio_B.clamp(max=1.0), 1.0)
        terms_B = -taper_B * rewards_B * inputs.logprobs_B_T.sum(dim=-1)
        return Surrogate(terms_B, (rewards_B < 0) & (ratio_B > 1.0))
