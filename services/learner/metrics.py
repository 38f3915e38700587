"""What a step tells about itself, from per-row and per-token values. Pure; the trainer uses it.

Per-token values are flat arrays, as in `batching`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from services.learner.batching import StepBatch
from services.learner.losses.base import MAX_LOG_RATIO

Metrics = dict[str, float]


class Clock:
    """Adds up the seconds of the parts of a step; `on_part` is told of each as it begins."""

    def __init__(self, on_part: Callable[[str], None] | None = None) -> None:
        self._on_part = on_part
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        if self._on_part is not None:
            self._on_part(part)
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    def metrics(self) -> Metrics:
        """time/<part> and time/total, in seconds."""
        parts = {f"time/{part}": seconds for part, seconds in self._seconds.items()}
        return parts | {"time/total": time.perf_counter() - self._start}


class Means:
    """Running sums and counts of named values on this rank; `vector` is summed over ranks."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.vector = np.zeros(2 * len(names))

    def add(self, name: str, total: float, count: float) -> None:
        """`count` values that add up to `total`."""
        place = 2 * self._names.index(name)
        self.vector[place : place + 2] += total, count

    def total(self, name: str) -> float:
        """Sum of a name's values."""
        return float(self.vector[2 * self._names.index(name)])

    def metrics(self) -> Metrics:
        """The mean of each name that has values; advantage/std in place of the advantages' mean square."""
        pairs = self.vector.reshape(-1, 2)
        means = {
            name: float(total / count)
            for name, (total, count) in zip(self._names, pairs, strict=True)
            if count
        }
        square = means.pop("advantage/square", None)
        if square is not None:
            means["advantage/std"] = max(0.0, square - means["advantage/mean"] ** 2) ** 0.5
        return means


def of_samples(batch: StepBatch) -> Metrics:
    """Rewards, lengths and endings of all completions, run through the model or not."""
    if not batch.samples:
        return {}
    informative = [bool(units) for units in batch.units]
    return {
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()),
        "response_length/mean": float(batch.lengths.mean()),
        "response_length/max": float(batch.lengths.max()),
        "eos_rate": float(np.mean([sample.has_eos for sample in batch.samples])),
        "informative_fraction": float(np.mean(informative)),
    }


def of_policies(
    batch: StepBatch,
    rows: np.ndarray,
    start: np.ndarray,
    reference: np.ndarray | None,
    *,
    to_behaviour: bool = True,
) -> Metrics:
    """How far apart mu, the policy at the step's start and the reference are.

    `start`: log-probs of the policy at the step's start, flat; only those of `rows` count.
    KL from mu is estimated per token by k3 = exp(-d) - 1 + d with d = log mu - log pi (unbiased, never
    negative, little noise); KL to the reference by k1, summed over the sequence. `to_behaviour`: whether
    mu is at the temperature of the others, and can be compared.
    """
    if not len(rows):
        return {}
    metrics = _of_behaviour(batch, rows, start) if to_behaviour else {}
    if reference is not None:
        metrics["kl"] = float(batch.row_sums(start - reference)[rows].mean())
    return metrics


def _of_behaviour(batch: StepBatch, rows: np.ndarray, start: np.ndarray) -> Metrics:
    index = batch.flat_index(rows)
    tokens = index[batch.mask[index]]
    lags = np.repeat(batch.lags, batch.lengths)[tokens]
    drift = batch.behaviour[tokens].astype(np.float64) - start[tokens]
    k3 = np.exp(np.clip(-drift, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - 1.0 + drift
    weights = _sequence_weights(batch, rows, start)
    metrics = {"ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))}
    if len(tokens):
        metrics["drift_kl"] = float(k3.mean())
        metrics["logprob_diff/max"] = float(np.abs(drift).max())
    for lag in np.unique(lags):
        metrics[f"drift_kl/lag_{lag}"] = float(k3[lags == lag].mean())
    if (lags == 0).any():
        metrics["mismatch_kl"] = float(k3[lags == 0].mean())
    return metrics


def _sequence_weights(batch: StepBatch, rows: np.ndarray, start: np.ndarray) -> np.ndarray:
    """pi_old / mu of whole sequences."""
    log_weights = batch.row_sums(start - batch.behaviour)[rows]
    return np.exp(np.clip(log_weights, -MAX_LOG_RATIO, MAX_LOG_RATIO))
