"""Corrections for samples of older weights or another engine: factors from the detached pi_old / mu.

They compose with every loss that has a ratio to pi_old; `policy_gradient` multiplies them onto its terms.
Each is a pure function of constants; none depends on other rows.

Legend: R rows, N tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offbeat.config.losses import (
    CorrectionSettings,
    MaskedIS,
    SequenceIS,
    SequenceMask,
    TruncatedIS,
)
from services.learner.losses.base import MAX_LOG_RATIO, Constants


def correction_weights(
    corrections: Sequence[CorrectionSettings], constants: Constants, advantages_N: np.ndarray
) -> np.ndarray | None:
    """Product of the corrections' factors, float64 (N,); None without corrections."""
    if not corrections:
        return None
    weights = np.ones(len(constants.mask))
    for settings in corrections:
        weights *= _factor(settings, constants, advantages_N)
    return weights


def log_weights(constants: Constants) -> np.ndarray:
    """log pi_old - log mu of each token, float64 (N,)."""
    assert constants.old is not None
    return constants.old.astype(np.float64) - constants.behaviour


def bounded_exp(values: np.ndarray) -> np.ndarray:
    """exp of values cut to ±MAX_LOG_RATIO."""
    return np.exp(np.clip(values, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def truncated_is(constants: Constants, cap: float) -> np.ndarray:
    """min(pi_old / mu, cap) per token (TIS, Yao et al. 2025)."""
    return np.minimum(bounded_exp(log_weights(constants)), cap)


def masked_is(constants: Constants, low: float, high: float) -> np.ndarray:
    """pi_old / mu per token where it lies in low .. high, else 0 (IcePop, arXiv 2510.18855)."""
    weights = bounded_exp(log_weights(constants))
    return np.where((weights >= low) & (weights <= high), weights, 0.0)


def sequence_is(constants: Constants, mode: str, low: float, high: float) -> np.ndarray:
    """exp sum_t (log pi_old - log mu) of the row, cut to low .. high, or 0 beyond (mode mask)."""
    weights_R = bounded_exp(constants.row_sums(log_weights(constants)))
    if mode == "mask":
        weights_R = np.where((weights_R >= low) & (weights_R <= high), weights_R, 0.0)
    return constants.over_tokens(np.clip(weights_R, low if mode == "truncate" else 0.0, high))


def sequence_mask(constants: Constants, advantages_N: np.ndarray, delta: float) -> np.ndarray:
    """0 for rows with negative advantage and mean_t (log mu - log pi_old) > delta, else 1 (DeepSeek-V3.2, eq. 9)."""
    distance_N = constants.over_tokens(constants.row_means(-log_weights(constants)))
    return np.where((advantages_N < 0) & (distance_N > delta), 0.0, 1.0)


def _factor(
    settings: CorrectionSettings, constants: Constants, advantages_N: np.ndarray
) -> np.ndarray:
    match settings:
        case TruncatedIS():
            return truncated_is(constants, settings.cap)
        case MaskedIS():
            return masked_is(constants, settings.low, settings.high)
        case SequenceIS():
            return sequence_is(constants, settings.mode, settings.low, settings.high)
        case SequenceMask():
            return sequence_mask(constants, advantages_N, settings.delta)
