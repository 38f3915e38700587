"""Decoupled clip and dynamic sampling policy optimization.

    A_k = (R_k - mean of the group) / (deviation + 1e-4),  R_k = score_k + shaping(length)
    mean over tokens of max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high))

The upper edge is the wider one. `overlong_buffer` shapes the reward: it falls by up to
`overlong_penalty` over the last tokens before sampling.max_tokens. Dynamic sampling is
schedule.oversample with learner.filter_equal_groups; leaving cut-off completions out is
learner.mask_truncated.

Source: arXiv 2503.14476, eq. 8 and 13. Legend: B rows of a micro-batch, T positions, R rows of groups.
"""

from __future__ import annotations

import numpy as np

from offbeat.config.losses import DAPO
from services.learner.losses.advantages import overlong_shaping
from services.learner.losses.base import Constants
from services.learner.losses.grpo import ClippedTokens, GroupScaledLoss


class DAPOLoss(ClippedTokens, GroupScaledLoss):
    """See the module; terms (B, T)."""

    reduction = "token"
    settings: DAPO

    def shaping(self, constants: Constants) -> np.ndarray | None:
        """The soft punishment of long completions, (R,)."""
        buffer = self.settings.overlong_buffer
        if buffer is None:
            return None
        penalty = self.settings.overlong_penalty or 1.0
        return overlong_shaping(constants.lengths, self.max_tokens, buffer, penalty)

    @property
    def equal_rewards_matter(self) -> bool:
        """With shaping, completions of equal scores differ by their lengths."""
        return super().equal_rewards_matter or self.settings.overlong_buffer is not None
