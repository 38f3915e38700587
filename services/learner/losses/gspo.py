"""Group sequence policy optimization: clipping on a length-normalised ratio of whole completions.

    s = exp( (1 / |y|) sum_t (log pi_theta - log pi_old) )
    mean over samples of max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

Source: arXiv 2507.18071, eq. 5 to 7. Legend: B rows of a micro-batch, T positions.
"""

from __future__ import annotations

from offbeat.config.losses import GSPO
from services.learner.losses.base import LossInputs, exp_ratio, masked_mean
from services.learner.losses.grpo import GroupScaledLoss
from services.learner.losses.policy_gradient import Surrogate, clipped, row_values


class GSPOLoss(GroupScaledLoss):
    """See the module; terms (B,)."""

    reduction = "sample_mean"
    settings: GSPO

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped terms, (B,)."""
        assert inputs.advantages_B_T is not None
        mask = inputs.mask_B_T
        ratio_B = exp_ratio(masked_mean(inputs.logprobs_B_T - inputs.old_logprobs_B_T, mask))
        advantages_B = row_values(inputs.advantages_B_T, mask)
        return clipped(ratio_B, advantages_B, self.settings.clip_low, self.settings.clip_high)
