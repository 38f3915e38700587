"""How a step's groups are cut into mini-batches, shares of ranks, and micro-batches. Pure; no I/O.

The trainer uses it. A **unit** is what the loss needs in one forward pass (a pair for online DPO, a group for RLOO);
a unit is never spread over ranks or micro-batches, so a loss is a sum over units, and its value and gradient do not
depend on how the units are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Sample:
    """One scored completion.

    `token_ids` int32 (T,), the end-of-sequence token included; `behaviour_logprobs` float32 (T,), log mu at the sampling
    temperature; `lag`: steps between the learner and the weights of the oldest token; `loss_mask` bool (T,), None: all
    tokens are trained on; `reference_logprobs` float32 (T,), None: the trainer computes them.
    """

    token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    reward: float
    has_eos: bool
    lag: int = 0
    loss_mask: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Group:
    """The completions of one prompt. `prompt_token_ids` is int32 (P,), P >= 1."""

    ordinal: int
    prompt_token_ids: np.ndarray
    completions: tuple[Sample, ...]


def mini_batches(count: int, parts: int) -> list[range]:
    """Cuts `count` groups into `parts` contiguous slices whose sizes differ by at most 1; some are empty if count < parts."""
    raise NotImplementedError
