"""Rewards and advantages, from constants alone, in float64. The policy-gradient losses choose among them.

Legend: R rows of whole groups, N tokens of all of them.
"""

from __future__ import annotations

import numpy as np

from offbeat.config.losses import PolicyGradient
from services.learner.losses.base import Constants

# Added to a group's or step's standard deviation, as in TRL.
DEVIATION_EPS = 1e-4
WHITENING_EPS = 1e-8


def processed_rewards(
    settings: PolicyGradient, constants: Constants, shaping_R: np.ndarray | None = None
) -> np.ndarray:
    """Rewards (R,): + shaping, whitened over all rows, scaled, clipped, less the KL where the settings say so.

    The KL of a row is k1, sum_t (log pi_old - log pi_ref).
    """
    rewards = constants.rewards if shaping_R is None else constants.rewards + shaping_R
    if settings.whiten_rewards:
        rewards = whitened(rewards)
    rewards = rewards * settings.reward_scale
    if settings.reward_clip is not None:
        rewards = np.clip(rewards, -settings.reward_clip, settings.reward_clip)
    if settings.kl_in_reward:
        rewards = rewards - settings.kl_coef * constants.row_sums(kl_to_reference(constants))
    return rewards


def kl_to_reference(constants: Constants) -> np.ndarray:
    """k1 of each token, log pi_old - log pi_ref, float64 (N,)."""
    assert constants.old is not None
    assert constants.reference is not None
    return constants.old.astype(np.float64) - constants.reference


def whitened(values: np.ndarray) -> np.ndarray:
    """Mean 0, deviation 1 (unbiased). Fewer than two values, or equal ones, become 0."""
    if len(values) < 2 or (values == values[0]).all():
        return np.zeros(len(values))
    return (values - values.mean()) / (values.std(ddof=1) + WHITENING_EPS)


def leave_one_out(rewards_R: np.ndarray, constants: Constants) -> np.ndarray:
    """A_k = R_k - mean of R_j over the other j of the group, (R,). A group of one has advantage 0."""
    sizes = constants.sizes
    # R_k - (S - R_k) / (K - 1)  =  (R_k - S / K) K / (K - 1)
    return centred(rewards_R, constants) * sizes / np.maximum(sizes - 1, 1.0)


def centred(rewards_R: np.ndarray, constants: Constants) -> np.ndarray:
    """A_k = R_k - mean of the group, (R,); exactly 0 in a group of equal rewards."""
    # Differences to the group's first reward: equal rewards cancel without a rounding error.
    shifted = rewards_R - constants.group_firsts(rewards_R)
    return shifted - constants.group_sums(shifted) / constants.sizes


def group_scaled(rewards_R: np.ndarray, constants: Constants, scale: str) -> np.ndarray:
    """(R_k - mean of the group) / (deviation + 1e-4), (R,). `scale`: whose deviation: group, batch, none.

    Deviations are unbiased (K - 1), as in TRL; a group of one has advantage 0.
    """
    advantages = centred(rewards_R, constants)
    if scale == "none":
        return advantages
    if scale == "batch":
        deviation = rewards_R.std(ddof=1) if len(rewards_R) > 1 else np.float64(0.0)
        return advantages / (deviation + DEVIATION_EPS)
    variances = constants.group_sums(advantages**2) / np.maximum(constants.sizes - 1, 1.0)
    return advantages / (np.sqrt(variances) + DEVIATION_EPS)


def whitened_over_tokens(advantages_N: np.ndarray, mask_N: np.ndarray) -> np.ndarray:
    """Mean 0, deviation 1 over the trained tokens (N,); 0 elsewhere."""
    result = np.zeros(len(advantages_N))
    result[mask_N] = whitened(advantages_N[mask_N])
    return result


def overlong_shaping(
    lengths_R: np.ndarray, longest: int, buffer: int, penalty: float
) -> np.ndarray:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13), (R,).

    0 up to longest - buffer tokens, falling to -penalty at `longest` and staying there.
    """
    beyond = lengths_R - (longest - buffer)
    return -penalty * np.clip(beyond / buffer, 0.0, 1.0)
