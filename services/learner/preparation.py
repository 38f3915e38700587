"""Advantages and weights of a step: when they are computed, and from which rows. The trainer uses it.

`losses.base.PreparedLoss` says what is computed; this module calls it with the whole step, with an update's
rows, or, where pi_old is known in the forward pass only, with a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from services.learner.batching import MicroBatch, StepBatch, Unit, flattened, rows_in
from services.learner.losses import Constants, PreparedLoss, ValueLoss


def constants_of(
    batch: StepBatch,
    units: Sequence[Unit],
    *,
    old: np.ndarray | None,
    reference: np.ndarray | None,
    values: np.ndarray | None = None,
) -> Constants:
    """What is known of units (whole groups, or single rows); `old`, `reference`, `values` are flat over the step."""
    rows = rows_in(units)
    index = batch.flat_index(rows)
    return Constants(
        rewards=batch.rewards[rows],
        lengths=batch.lengths[rows],
        has_eos=np.array([batch.samples[row].has_eos for row in rows], np.bool_),
        group_sizes=tuple(len(unit) for unit in units),
        mask=batch.mask[index],
        behaviour=batch.behaviour[index],
        old=None if old is None else old[index],
        reference=None if reference is None else reference[index],
        values=None if values is None else values[index],
    )


class Preparation:
    """The advantages of a step and the weights of its present update. Every rank has the same."""

    def __init__(
        self,
        loss: PreparedLoss,
        batch: StepBatch,
        old: np.ndarray | None,
        reference: np.ndarray | None,
        values: np.ndarray | None = None,
    ) -> None:
        self._loss, self._batch = loss, batch
        self._old, self._reference, self._values = old, reference, values
        self._returns: np.ndarray | None = None
        self._advantages: np.ndarray | None = None
        self._weights: np.ndarray | None = None
        if old is not None or not loss.advantages_use_old:
            groups = [tuple(batch.rows_of(group)) for group in range(len(batch.groups))]
            constants = self._constants(groups)
            self._advantages = loss.advantages(constants)
            if isinstance(loss, ValueLoss):
                self._returns = loss.returns(constants)

    def begin_update(self, units: Sequence[Unit]) -> list[Unit]:
        """Computes the weights of an update's units; returns what the update is cut into.

        With the advantages known the terms are row by row, so rows need not stay together.
        """
        if self._advantages is None:
            return list(units)
        if self._old is not None:
            self._weights = self._spread(units, self._weights_of(self._constants(units), units))
        return [(row,) for row in rows_in(units)]

    def of(self, units: MicroBatch, logprobs_B_T: Tensor) -> tuple[Tensor, Tensor | None]:
        """Advantages and weights of a micro-batch, (B, T) like the log-probs; weights None: 1 everywhere.

        Where pi_old is not known beforehand it is `logprobs_B_T`, the policy of the update itself.
        """
        rows = rows_in(units)
        advantages, weights = self._advantages, self._weights
        if advantages is None or self._old is None:
            old = self._old
            if old is None:
                old = flattened(logprobs_B_T, self._batch, rows)
            constants = self._constants(units, old)
            if advantages is None:
                advantages = self._spread(units, self._loss.advantages(constants))
                assert advantages is not None
            index = self._batch.flat_index(rows)
            weights = self._spread(units, self._loss.weights(constants, advantages[index]))
        padded = self._batch.padded(advantages, rows).to(logprobs_B_T)
        if weights is None:
            return padded, None
        return padded, self._batch.padded(weights, rows).to(logprobs_B_T)

    def value_targets(self, rows: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values of the step's start, returns, and mask of rows, (B, T), of the type of `like`."""
        assert self._values is not None
        assert self._returns is not None
        batch = self._batch
        values, returns = batch.padded(self._values, rows), batch.padded(self._returns, rows)
        return values.to(like), returns.to(like), batch.padded(batch.mask, rows).to(like.device)

    def _constants(self, units: Sequence[Unit], old: np.ndarray | None = None) -> Constants:
        known = self._old if old is None else old
        return constants_of(
            self._batch, units, old=known, reference=self._reference, values=self._values
        )

    def _weights_of(self, constants: Constants, units: Sequence[Unit]) -> np.ndarray | None:
        assert self._advantages is not None
        index = self._batch.flat_index(rows_in(units))
        return self._loss.weights(constants, self._advantages[index])

    def _spread(self, units: Sequence[Unit], values: np.ndarray | None) -> np.ndarray | None:
        """Values of the units' tokens at their places in the step, 0 elsewhere."""
        if values is None:
            return None
        flat = np.zeros(len(self._batch.behaviour))
        flat[self._batch.flat_index(rows_in(units))] = values
        return flat
