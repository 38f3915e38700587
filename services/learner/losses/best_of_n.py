"""Supervised training on the best completion of each group.

    mean over groups of -sum_t log pi_theta(y_best)

The best is the lowest index among equals, also where all rewards are equal;
learner.filter_equal_groups leaves such groups out. Source: arXiv 2410.18252 (best-of-2 SFT, its
contrast-free baseline). Legend: B rows of a micro-batch, K completions of a group.
"""

from __future__ import annotations

import numpy as np

from services.learner.losses.base import LossInputs, LossOutput, Normaliser, sequence_sums


class BestOfNLoss:
    """See the module; terms (B,)."""

    needs_reference = False
    needs_old = False
    normalise_by: Normaliser = "group"
    metric_names: tuple[str, ...] = ("best_reward",)

    def units(self, rewards_K: np.ndarray) -> list[tuple[int, ...]]:
        """The best alone."""
        return [(int(np.argmax(rewards_K)),)]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Terms (B,)."""
        terms_B = -sequence_sums(inputs.logprobs_B_T, inputs.mask_B_T)
        return LossOutput(terms_B, {"best_reward": inputs.rewards_B})
