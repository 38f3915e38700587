"""What a step carries through its updates. The trainer makes one per step and fills it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.learner import metrics
from services.learner.batching import StepBatch
from services.learner.distributed import sum_over_ranks
from services.learner.losses import LossOutput
from services.learner.preparation import Preparation


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
        # None: the loss has no advantages or weights of its own.
        self.preparation: Preparation | None = None
        # The policy before the first update: its log-probs, and 1.0 for each row that they are known of.
        self.start = np.zeros(len(batch.behaviour), np.float32)
        self.seen = np.zeros(len(batch.samples), np.float32)
        self.start_everywhere = False
        self.grad_norms: list[float] = []
        self.critic_grad_norms: list[float] = []
        self.learning_rate = 0.0

    def count(self, output: LossOutput) -> None:
        """Adds a loss's metrics to the step's means."""
        for name, values in output.metrics.items():
            self.means.add(name, float(values.float().sum()), values.numel())

    def metrics(self, *, to_behaviour: bool) -> metrics.Metrics:
        """What the step tells, the same on every rank. Collective. `to_behaviour`: see `metrics.of_policies`."""
        if not self.start_everywhere:
            self.start, self.seen = sum_over_ranks(self.start), sum_over_ranks(self.seen)
        self.means.vector = sum_over_ranks(self.means.vector)
        rows = np.flatnonzero(self.seen)
        found = metrics.of_samples(self.batch)
        found |= metrics.of_policies(
            self.batch, rows, self.start, self.reference, to_behaviour=to_behaviour
        )
        found |= self.means.metrics() | {"learning_rate": self.learning_rate}
        if self.grad_norms:
            found["grad_norm"] = float(np.mean(self.grad_norms))
            found["loss"] = self.means.total("loss") / len(self.grad_norms)
        if self.critic_grad_norms:
            found["critic_grad_norm"] = float(np.mean(self.critic_grad_norms))
        return found

    def note_start(
        self, logprobs: np.ndarray, rows: Sequence[int], *, everywhere: bool = False
    ) -> None:
        """Keeps log-probs of the policy before the first update; `everywhere`: all ranks have all."""
        self.start = self.start + logprobs
        self.seen[list(rows)] = 1.0
        self.start_everywhere = everywhere
