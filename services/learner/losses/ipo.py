"""IPO on the best and the worst completion of each group.

    mean over groups of (D_theta - D_ref - 1 / (2 beta))^2,   D = sum_t log pi(y+) - sum_t log pi(y-)

A group whose rewards are all equal adds 0. Source: arXiv 2310.12036, eq. 17, online as in
arXiv 2410.18252. Legend: B = 2 U rows in the order best, worst, best, worst, ...; U pairs.
"""

from __future__ import annotations

from services.learner.losses.base import LossInputs, LossOutput, sequence_sums
from services.learner.losses.online_dpo import PairLoss


class IPOLoss(PairLoss):
    """See the module; terms (U,)."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Terms (U,)."""
        assert inputs.reference_logprobs_B_T is not None
        log_ratios_B = sequence_sums(
            inputs.logprobs_B_T - inputs.reference_logprobs_B_T, inputs.mask_B_T
        )
        margins_U = log_ratios_B[0::2] - log_ratios_B[1::2]
        terms_U = (margins_U - 1 / (2 * self.beta)) ** 2
        return self.output(terms_U, self.beta * margins_U)
