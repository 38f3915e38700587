"""Second-moment trust policy optimization: leaves out few outliers, and clips nothing else.

    M = the largest set of tokens with mean over M of (log pi_old / mu)^2 <= m2_threshold
    mean over tokens of -[t in M] (pi_theta / mu) A

M is chosen over all tokens of the update that are run, the smallest squares first.

Source: arXiv 2510.01161 (its log ratio taken at the step's start, as in AReaL), with the advantage of
GRPO. Legend: B rows of a micro-batch, T positions, N tokens of whole groups.
"""

from __future__ import annotations

import numpy as np

from offbeat.config.losses import M2PO
from services.learner.losses.base import Constants, LossInputs, exp_ratio
from services.learner.losses.corrections import log_weights
from services.learner.losses.grpo import GroupScaledLoss
from services.learner.losses.policy_gradient import Surrogate


def second_moment_mask(squares_N: np.ndarray, threshold: float) -> np.ndarray:
    """The largest set whose mean is at most the threshold, bool (N,); of equal squares the first ones."""
    order = np.argsort(squares_N, kind="stable")
    means = np.cumsum(squares_N[order]) / np.arange(1, len(order) + 1)
    kept = np.zeros(len(squares_N), np.bool_)
    # Means of ascending values ascend, so that the kept ones are a prefix.
    kept[order[means <= threshold]] = True
    return kept


class M2POLoss(GroupScaledLoss):
    """See the module; terms (B, T)."""

    reduction = "token"
    whole_batch = True
    settings: M2PO

    def weights(self, constants: Constants, advantages_N: np.ndarray) -> np.ndarray:
        """1 for the tokens of M, else 0, times the corrections' factor."""
        mask = constants.mask
        kept = np.zeros(len(mask))
        squares = log_weights(constants)[mask] ** 2
        kept[mask] = second_moment_mask(squares, self.settings.m2_threshold)
        corrections = super().weights(constants, advantages_N)
        return kept if corrections is None else kept * corrections

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """-(pi_theta / mu) A, (B, T)."""
        assert inputs.advantages_B_T is not None
        assert inputs.weights_B_T is not None
        ratio_B_T = exp_ratio(inputs.logprobs_B_T - inputs.behaviour_logprobs_B_T)
        return Surrogate(-inputs.advantages_B_T * ratio_B_T, inputs.weights_B_T == 0)
