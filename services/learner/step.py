"""What a step carries through its updates. The trainer makes one per step and fills it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from services.learner import metrics
from services.learner.batching import StepBatch


class StepState:
    """What a step carries through its updates. Flat arrays are as in `batching`."""

    def __init__(
        self, batch: StepBatch, clock: metrics.Clock, loss_metrics: tuple[str, ...]
    ) -> None:
        self.batch = batch
        self.clock = clock
        self.means = metrics.Means(("loss", "entropy", *loss_metrics))
        self.reference: np.ndarray | None = None
        # None: the policy of the update itself.
        self.old: np.ndarray | None = None
        # The policy before the first update: its log-probs, and 1.0 for each row that they are known of.
        self.start = np.zeros(len(batch.behaviour), np.float32)
        self.seen = np.zeros(len(batch.samples), np.float32)
        self.start_everywhere = False
        self.grad_norms: list[float] = []
        self.learning_rate = 0.0

    def note_start(
        self, logprobs: np.ndarray, rows: Sequence[int], *, everywhere: bool = False
    ) -> None:
        """Keeps log-probs of the policy before the first update; `everywhere`: all ranks have all."""
        self.start = self.start + logprobs
        self.seen[list(rows)] = 1.0
        self.start_everywhere = everywhere


def flattened(values_B_T: Tensor, batch: StepBatch, rows: Sequence[int]) -> np.ndarray:
    """Per-token values of the rows in a flat array, 0 elsewhere."""
    flat = np.zeros(len(batch.behaviour), np.float32)
    if rows:
        values = values_B_T.detach().cpu().numpy()
        inside = np.arange(values.shape[1]) < batch.lengths[list(rows)][:, None]
        flat[batch.flat_index(rows)] = values[inside]
    return flat
