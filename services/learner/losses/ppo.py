"""Proximal policy optimization with a critic.

    r_t   = -kl_coef (log pi_old - log pi_ref)_t,  plus the score at the last trained token   (kl_in: reward)
    d_t   = r_t + gamma V_{t+1} - V_t,   A_t = d_t + gamma lambda A_{t+1},   return_t = A_t + V_t
    mean over tokens of  max(-A r, -A clip(r, 1 - clip, 1 + clip))
    + vf_coef / 2 · mean over tokens of  max((v - return)^2, (clip(v, V - c, V + c) - return)^2)

V are the critic's values at the step's start, v its present ones; A is whitened over the step. The value
after the last token is 0, for cut-off completions too, as in TRL. Whitened rewards keep their mean.
Tokens that are not trained on do not count as steps.

Sources: arXiv 1707.06347, 1506.02438 (GAE); details as in arXiv 2410.18252 (TRL's PPOv2), but the score
is given at the last token instead of the padding after it. Legend: N tokens of whole groups.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offbeat.config.losses import PPO
from services.learner.losses.advantages import (
    WHITENING_EPS,
    kl_to_reference,
    whitened_over_tokens,
)
from services.learner.losses.base import Constants, LossInputs, LossOutput
from services.learner.losses.policy_gradient import (
    PolicyGradientLoss,
    Surrogate,
    clipped,
    token_ratio,
)


def gae(
    rewards_N: np.ndarray, values_N: np.ndarray, counts_R: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Generalised advantage estimates, (N,). `counts_R`: steps of each row; N is their sum."""
    longest = int(counts_R.max(initial=0))
    inside = np.arange(longest) < counts_R[:, None]
    rewards, values = np.zeros((2, len(counts_R), longest + 1))
    rewards[:, :-1][inside], values[:, :-1][inside] = rewards_N, values_N
    advantages = np.zeros_like(values)
    for t in reversed(range(longest)):
        delta = rewards[:, t] + gamma * values[:, t + 1] - values[:, t]
        advantages[:, t] = (delta + gamma * lam * advantages[:, t + 1]) * inside[:, t]
    return advantages[:, :-1][inside]


class PPOLoss(PolicyGradientLoss):
    """See the module; terms (B, T) of the policy, and `value_terms` of the critic."""

    reduction = "token"
    # GAE needs values, which the critic computes once per step.
    whole_batch = True
    settings: PPO
    value_metric_names: tuple[str, ...] = (
        "value_loss",
        "value_clip_fraction",
        "value/mean",
        "return/mean",
    )

    @property
    def shares_policy(self) -> bool:
        """Whether the critic is a head on the policy."""
        return self.settings.critic == "shared_head"

    @property
    def equal_rewards_matter(self) -> bool:
        """There is no group to compare with."""
        return True

    def units(self, rewards_K: np.ndarray) -> list[tuple[int, ...]]:
        """Each completion alone."""
        return [(k,) for k in range(len(rewards_K))]

    def token_rewards(self, constants: Constants) -> np.ndarray:
        """r_t of every token, float64 (N,); 0 at untrained ones."""
        given = self.settings
        rewards = np.zeros(len(constants.mask))
        if given.kl_in_reward:
            rewards = np.where(constants.mask, -given.kl_coef * kl_to_reference(constants), 0.0)
        scores = constants.rewards * given.reward_scale
        if given.reward_clip is not None:
            scores = np.clip(scores, -given.reward_clip, given.reward_clip)
        last, trained = _last_trained(constants)
        rewards[last] += scores[trained]
        if given.whiten_rewards:
            rewards = rewards / (np.std(rewards[constants.mask], ddof=1) + WHITENING_EPS)
        return rewards

    def estimates(self, constants: Constants) -> np.ndarray:
        """Advantages before whitening, (N,); 0 at untrained tokens."""
        assert constants.values is not None
        mask, given = constants.mask, self.settings
        counts = constants.row_sums(np.ones(len(mask))).astype(np.int64)
        values = constants.values.astype(np.float64)
        found = np.zeros(len(mask))
        rewards = self.token_rewards(constants)
        found[mask] = gae(rewards[mask], values[mask], counts, given.gamma, given.gae_lambda)
        return found

    def advantages(self, constants: Constants) -> np.ndarray:
        """A of every token, (N,)."""
        found = self.estimates(constants)
        if not self.settings.whiten_advantages:
            return found
        return whitened_over_tokens(found, constants.mask)

    def returns(self, constants: Constants) -> np.ndarray:
        """What the critic is drawn to, (N,)."""
        assert constants.values is not None
        return self.estimates(constants) + constants.values

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The clipped terms, (B, T)."""
        assert inputs.advantages_B_T is not None
        clip = self.settings.clip
        return clipped(token_ratio(inputs), inputs.advantages_B_T, clip, clip)

    def value_terms(
        self, values_B_T: Tensor, old_B_T: Tensor, returns_B_T: Tensor, mask_B_T: Tensor
    ) -> LossOutput:
        """The critic's terms, (B, T), over the same normaliser as the policy's."""
        values, old, returns = (
            torch.where(mask_B_T, part, 0.0) for part in (values_B_T, old_B_T, returns_B_T)
        )
        plain, near = (values - returns) ** 2, values
        if self.settings.value_clip is not None:
            clip = self.settings.value_clip
            near = torch.minimum(torch.maximum(values, old - clip), old + clip)
        bounded = (near - returns) ** 2
        terms = 0.5 * self.settings.vf_coef * torch.maximum(plain, bounded)
        metrics = {
            "value_loss": 0.5 * torch.maximum(plain, bounded).detach()[mask_B_T],
            "value_clip_fraction": (bounded > plain)[mask_B_T],
            "value/mean": values.detach()[mask_B_T],
            "return/mean": returns[mask_B_T],
        }
        return LossOutput(terms, metrics)


def _last_trained(constants: Constants) -> tuple[np.ndarray, np.ndarray]:
    """Places of the last trained token of each row that has one, and which rows those are, bool (R,)."""
    places = np.flatnonzero(constants.mask)
    rows = np.repeat(np.arange(len(constants.lengths)), constants.lengths)[places]
    final = np.ones(len(places), np.bool_)
    final[:-1] = rows[1:] != rows[:-1]
    trained = np.zeros(len(constants.lengths), np.bool_)
    trained[rows] = True
    return places[final], trained
