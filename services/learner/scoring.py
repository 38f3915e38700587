"""Forward passes over a step's rows: how they are cut, what the model is given. The trainer and the critic use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from offbeat.config import Recipe
from services.learner.batching import Share, StepBatch, Unit, flattened, rows_in, shares
from services.learner.distributed import sum_over_ranks


class Passes:
    """The passes of one rank. Methods that are said to be collective are called by all ranks together."""

    def __init__(self, recipe: Recipe, *, rank: int, world: int, device: torch.device) -> None:
        self.device = device
        self.temperature = recipe.learner.logprob_temperature or recipe.sampling.temperature
        self._batching = recipe.learner.batching
        self._rank, self._world = rank, world

    def share(self, batch: StepBatch, units: Sequence[Unit]) -> Share:
        """This rank's micro-batches."""
        return shares(
            units,
            batch.total_lengths,
            world=self._world,
            max_tokens=self._batching.micro_batch_tokens,
            bucket=self._batching.bucket_by_length,
        )[self._rank]

    def arguments(self, batch: StepBatch, rows: Sequence[int]) -> tuple[Any, ...]:
        """Arguments of `TokenScorer` or `ValueScorer`; without rows, those of the smallest pass."""
        device = self.device
        if not rows:
            one = torch.ones(1, dtype=torch.int64, device=device)
            tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
            return tokens, one, one, 1, self.temperature
        tokens, prompts, completions, first = batch.collate(rows)
        lengths = (prompts.to(device), completions.to(device))
        return tokens.to(device), *lengths, first, self.temperature

    @torch.no_grad()
    def sequence_logprobs(
        self, scorer: nn.Module, sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """log pi at temperature 1 of tokens 1 .. n-1 of each sequence. Every rank scores all of them."""
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        results: list[list[float]] = [[] for _ in sequences]
        scored = [(row,) for row, length in enumerate(lengths) if length > 1]
        if not scored:
            return results
        capacity = self._batching.micro_batch_tokens
        # They are few, and so no rank needs to be told by another.
        for micro_batch in shares(scored, lengths, world=1, max_tokens=capacity, bucket=True)[0]:
            rows = rows_in(micro_batch)
            tokens = torch.zeros(len(rows), int(lengths[rows].max()), dtype=torch.int64)
            for line, row in enumerate(rows):
                tokens[line, : lengths[row]] = torch.tensor(sequences[row])
            prompts = torch.ones(len(rows), dtype=torch.int64, device=self.device)
            completions = torch.from_numpy(lengths[rows] - 1).to(self.device)
            logprobs, *_ = scorer(tokens.to(self.device), prompts, completions, 1, 1.0)
            for row, values in zip(rows, logprobs.tolist(), strict=True):
                results[row] = values[: lengths[row] - 1]
        return results

    @torch.no_grad()
    def score(
        self, scorer: nn.Module, batch: StepBatch, rows: Sequence[int], output: int = 0
    ) -> np.ndarray:
        """One of a scorer's outputs for the rows, flat, on every rank; 0 elsewhere. Collective."""
        flat = np.zeros(len(batch.behaviour), np.float32)
        for micro_batch in self.share(batch, [(row,) for row in rows]):
            chosen = rows_in(micro_batch)
            values = scorer(*self.arguments(batch, chosen))[output]
            flat += flattened(values, batch, chosen)
        return sum_over_ranks(flat)
