"""Online DPO on the best and the worst completion of each group.

Sources: arXiv 2305.18290 (DPO, eq. 7), applied online as in arXiv 2410.18252. It needs no behaviour
log-probs: the loss says nothing about who sampled the pair.

Legend: B samples, U pairs, K completions of a group, T completion positions. B = 2 U, rows in the
order best, worst, best, worst, ...
"""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.nn.functional import logsigmoid

from services.learner.losses.base import LossInputs, LossOutput, Normaliser, sequence_sums


def best_and_worst(rewards_K: np.ndarray) -> tuple[int, int] | None:
    """Indices of the highest and the lowest reward, the lowest index among equals; None: all equal."""
    best, worst = int(np.argmax(rewards_K)), int(np.argmin(rewards_K))
    return None if rewards_K[best] == rewards_K[worst] else (best, worst)


def dpo_terms(logprobs_B: Tensor, reference_B: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(terms, implicit reward margins) of pairs, both (U,), from summed log-probs (B,).

    margin = beta [(log pi(y+) - log ref(y+)) - (log pi(y-) - log ref(y-))];  term = -log sigma(margin)
    """
    implicit_rewards_B = beta * (logprobs_B - reference_B)
    margins_U = implicit_rewards_B[0::2] - implicit_rewards_B[1::2]
    return -logsigmoid(margins_U), margins_U


class PairLoss:
    """What the losses on best and worst of k share: a group whose rewards are all equal adds 0."""

    needs_reference = True
    needs_old = False
    normalise_by: Normaliser = "group"
    metric_names: tuple[str, ...] = ("dpo_margin", "dpo_accuracy")

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def units(self, rewards_K: np.ndarray) -> list[tuple[int, ...]]:
        """The pair, best first; none when all rewards are equal."""
        pair = best_and_worst(rewards_K)
        return [] if pair is None else [pair]

    def output(self, terms_U: Tensor, margins_U: Tensor) -> LossOutput:
        """Terms (U,) with the metrics of their implicit reward margins (U,)."""
        margins_U = margins_U.detach()
        return LossOutput(terms_U, {"dpo_margin": margins_U, "dpo_accuracy": margins_U > 0})


class OnlineDPOLoss(PairLoss):
    """Mean over groups of -log sigma(margin)."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Terms (U,)."""
        assert inputs.reference_logprobs_B_T is not None
        terms_U, margins_U = dpo_terms(
            sequence_sums(inputs.logprobs_B_T, inputs.mask_B_T),
            sequence_sums(inputs.reference_logprobs_B_T, inputs.mask_B_T),
            self.beta,
        )
        return self.output(terms_U, margins_U)
