"""Trajectory balance in its VarGrad form: regression of log-ratios on rewards, off-policy without weights.

    d_k = sum_t (log pi_theta - log pi_ref) - R_k / beta
    Z   = -mean of d_k over the group, detached
    mean over samples of (Z + d_k)^2

The optimum is pi_ref exp(R / beta) up to a constant, whoever sampled.

Source: arXiv 2503.18929 (TBA), eq. 5; arXiv 2010.10436 (VarGrad). Legend: B rows of a micro-batch
(whole groups one after the other), K completions of a group.
"""

from __future__ import annotations

import numpy as np
import torch

from services.learner.losses.base import LossInputs, LossOutput, Normaliser, sequence_sums


class VarGradLoss:
    """See the module; terms (B,)."""

    needs_reference = True
    needs_old = False
    normalise_by: Normaliser = "sample"
    metric_names: tuple[str, ...] = ("log_partition",)

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def units(self, rewards_K: np.ndarray) -> list[tuple[int, ...]]:
        """The whole group: the partition function is its estimate. Equal rewards pull to the reference."""
        return [tuple(range(len(rewards_K)))]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Terms (B,)."""
        assert inputs.reference_logprobs_B_T is not None
        log_ratios_B = sequence_sums(
            inputs.logprobs_B_T - inputs.reference_logprobs_B_T, inputs.mask_B_T
        )
        gaps_B = log_ratios_B - inputs.rewards_B / self.beta
        partitions = [-gaps_K.detach().mean() for gaps_K in gaps_B.split(inputs.unit_sizes)]
        sizes = torch.tensor(inputs.unit_sizes, device=gaps_B.device)
        partition_B = torch.stack(partitions).repeat_interleave(sizes)
        return LossOutput((partition_B + gaps_B) ** 2, {"log_partition": torch.stack(partitions)})
