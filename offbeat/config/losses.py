"""Settings of the losses and of the corrections for off-policy samples. Formulas: docs/algorithms.md."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from offbeat.config.base import Settings

RatioTo = Literal["none", "old", "behaviour"]


class LossBase(Settings):
    """What the settings of every loss tell about it.

    `ratio_to`: which log-probs the policy's ratio is taken to: pi_old (the step's start), mu (the
    generator's), or none, when the loss has no ratio. `min_k`: fewest completions that it compares.
    """

    ratio_to: ClassVar[RatioTo] = "none"
    min_k: ClassVar[int] = 2

    @property
    def has_ratio(self) -> bool:
        """Whether sampling that cuts the distribution would bias it."""
        return self.ratio_to != "none"


class OnlineDPO(LossBase):
    """Online DPO on the best and the worst of k (arXiv 2410.18252; DPO: arXiv 2305.18290)."""

    name: Literal["online_dpo"]
    beta: float = Field(0.1, gt=0, description="Strength of the pull to the reference.")


class IPO(LossBase):
    """IPO on the best and the worst of k: the margin is drawn to 1 / (2 beta) (arXiv 2310.12036)."""

    name: Literal["ipo"]
    beta: float = Field(0.1, gt=0, description="Strength of the pull to the reference.")


class CoPG(LossBase):
    """Contrastive policy gradient over all pairs of a group, off-policy without weights (arXiv 2406.19185)."""

    name: Literal["copg"]
    beta: float = Field(0.1, ge=0, description="Strength of the pull to the reference.")


class BestOfN(LossBase):
    """Supervised training on the best of k (the contrast-free baseline of arXiv 2410.18252)."""

    name: Literal["best_of_n"]


class VarGrad(LossBase):
    """Trajectory balance with the group's own estimate of the partition function (TBA, arXiv 2503.18929)."""

    name: Literal["vargrad"]
    beta: float = Field(
        0.05, gt=0, description="Strength of the pull to the reference: rewards count as R / beta."
    )


class PolicyGradient(LossBase):
    """What the losses with an advantage and a ratio share: the KL to the reference, and the rewards.

    Rewards are whitened, scaled, clipped in this order; then the KL comes off where it belongs to them.
    """

    ratio_to: ClassVar[RatioTo] = "old"
    kl_default: ClassVar[Literal["reward", "loss"]] = "loss"

    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL to the reference; 0: none.")
    kl_in: Literal["reward", "loss"] | None = Field(
        None,
        description="reward: log pi_old - log pi_ref (k1) comes off it; loss: k3 is added; null: reward for RLOO and "
        "PPO, loss for the others.",
    )
    whiten_rewards: bool = Field(
        False, description="Mean 0 and deviation 1 over the step's completions."
    )
    reward_scale: float = Field(1.0, gt=0, description="Rewards are multiplied by it.")
    reward_clip: float | None = Field(None, gt=0, description="Rewards are cut to ± this.")
    whiten_advantages: bool = Field(
        False, description="Mean 0 and deviation 1 over the step's trained tokens."
    )

    @model_validator(mode="after")
    def _kl_used(self) -> "PolicyGradient":
        if self.kl_in is not None and not self.kl_coef:
            raise ValueError("kl_in is not used with kl_coef 0; remove it or set kl_coef")
        return self

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL comes off the reward."""
        return self.kl_coef > 0 and (self.kl_in or self.kl_default) == "reward"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.kl_coef > 0 and (self.kl_in or self.kl_default) == "loss"


class RLOO(PolicyGradient):
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740)."""

    kl_default: ClassVar[Literal["reward", "loss"]] = "reward"

    name: Literal["rloo"]
    kl_coef: float = Field(0.05, ge=0, description="Weight of the sequence KL; 0: none.")


class ProximalRLOO(PolicyGradient):
    """RLOO with a clipped sequence ratio to the policy at the step's start (arXiv 2410.18252)."""

    kl_default: ClassVar[Literal["reward", "loss"]] = "reward"

    name: Literal["proximal_rloo"]
    kl_coef: float = Field(0.05, ge=0, description="Weight of the sequence KL; 0: none.")
    clip: float = Field(0.2, gt=0, lt=1, description="The ratio is clipped to 1 ± clip.")


class PPO(PolicyGradient):
    """Proximal policy optimization with a critic (arXiv 1707.06347; details of arXiv 2410.18252)."""

    min_k: ClassVar[int] = 1
    kl_default: ClassVar[Literal["reward", "loss"]] = "reward"

    name: Literal["ppo"]
    kl_coef: float = Field(0.05, ge=0, description="Weight of the KL; 0: none.")
    whiten_advantages: bool = Field(True, description="As in `PolicyGradient`.")
    clip: float = Field(0.2, gt=0, lt=1, description="The ratio is clipped to 1 ± clip.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Decay of GAE.")
    vf_coef: float = Field(0.1, gt=0, description="Weight of the critic's loss.")
    value_clip: float | None = Field(
        0.2, gt=0, description="Values are clipped to those of the step's start ± this; null: not."
    )
    critic: Literal["separate", "shared_head"] = Field(
        "separate", description="A model of its own, or a head on the policy."
    )
    critic_model: str | None = Field(
        None, description="Folder of a separate critic: a reward model; null: the policy's folder."
    )
    critic_lr: float | None = Field(
        None, gt=0, description="Peak rate of a separate critic; null: the policy's."
    )

    @model_validator(mode="after")
    def _critic_used(self) -> "PPO":
        if self.critic == "shared_head" and (self.critic_model or self.critic_lr):
            raise ValueError(
                "critic_model and critic_lr are not used with critic: shared_head; remove them"
            )
        return self


class GroupScaled(PolicyGradient):
    """Losses whose advantage is the reward less the group's mean, over a deviation."""

    scale: Literal["group", "batch", "none"] = Field(
        "group", description="Deviation that advantages are divided by: the group's, the step's."
    )


class GRPO(GroupScaled):
    """Group relative policy optimization (arXiv 2402.03300)."""

    name: Literal["grpo"]
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower edge of the ratio: 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="Upper edge of the ratio: 1 + clip_high.")


class DrGRPO(PolicyGradient):
    """GRPO without its biases: no deviation, a constant length (arXiv 2503.20783)."""

    name: Literal["dr_grpo"]
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower edge of the ratio: 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="Upper edge of the ratio: 1 + clip_high.")
    length: int | None = Field(
        None, gt=0, description="Length that sums are divided by; null: sampling.max_tokens."
    )


class DAPO(GroupScaled):
    """GRPO with a higher upper edge, a mean over tokens, and shaped lengths (arXiv 2503.14476).

    Its dynamic sampling is `schedule.oversample` with `learner.filter_equal_groups`.
    """

    name: Literal["dapo"]
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower edge of the ratio: 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, description="Upper edge of the ratio: 1 + clip_high.")
    overlong_buffer: int | None = Field(
        None,
        gt=0,
        description="Tokens before sampling.max_tokens over which the reward falls; null: none.",
    )
    overlong_penalty: float | None = Field(None, gt=0, description="How far it falls; null: 1.")

    @model_validator(mode="after")
    def _penalty_used(self) -> "DAPO":
        if self.overlong_penalty is not None and self.overlong_buffer is None:
            raise ValueError(
                "overlong_penalty is not used without overlong_buffer; set it or remove the penalty"
            )
        return self


class CISPO(GroupScaled):
    """Clipped, detached importance weights: every token keeps its gradient (arXiv 2506.13585)."""

    name: Literal["cispo"]
    ratio_max: float = Field(5.0, gt=0, description="Largest weight (5: arXiv 2510.13786).")


class GSPO(GroupScaled):
    """A clipped ratio of whole sequences, length-normalised (arXiv 2507.18071)."""

    name: Literal["gspo"]
    clip_low: float = Field(3e-4, gt=0, lt=1, description="Lower edge of the ratio: 1 - clip_low.")
    clip_high: float = Field(4e-4, gt=0, description="Upper edge of the ratio: 1 + clip_high.")


class DecoupledPPO(GroupScaled):
    """Clips to pi_old, weights by pi_old / mu (arXiv 2505.24298, eq. 5)."""

    ratio_to: ClassVar[RatioTo] = "behaviour"

    name: Literal["decoupled_ppo"]
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower edge of the ratio: 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="Upper edge of the ratio: 1 + clip_high.")
    weight_cap: float | None = Field(
        None, gt=0, description="Tokens whose weight is larger are left out; null: none."
    )


class TOPR(PolicyGradient):
    """Tapered off-policy REINFORCE: weights for bad completions only (arXiv 2503.14286)."""

    ratio_to: ClassVar[RatioTo] = "behaviour"
    min_k: ClassVar[int] = 1

    name: Literal["topr"]
    baseline: Literal["none", "group"] = Field(
        "none",
        description="Taken off the reward. Rewards of 0 and 1 need group, or nothing is pushed down.",
    )


class M2PO(GroupScaled):
    """Leaves out the tokens that make the second moment of log ratios too large (arXiv 2510.01161)."""

    ratio_to: ClassVar[RatioTo] = "behaviour"

    name: Literal["m2po"]
    m2_threshold: float = Field(
        0.04, gt=0, description="Largest mean of (log pi_old / mu)^2 over the tokens kept."
    )


class VESPO(GroupScaled):
    """Soft weights on the ratio of whole sequences, w^k exp(lambda (1 - w)) (arXiv 2602.10693)."""

    ratio_to: ClassVar[RatioTo] = "behaviour"

    name: Literal["vespo"]
    k_positive: float = Field(2.0, ge=0, description="k where the advantage is not negative.")
    lambda_positive: float = Field(3.0, gt=0, description="λ there.")
    k_negative: float = Field(3.0, ge=0, description="k where the advantage is negative.")
    lambda_negative: float = Field(2.0, gt=0, description="λ there.")


class CustomLoss(LossBase):
    """A loss of your own: a callable with the signature of `services.learner.losses.base.Loss`."""

    min_k: ClassVar[int] = 1

    name: Literal["custom"]
    path: str = Field(description="module:factory, or file.py:factory; called with params.")
    params: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")
    uses_ratio: bool = Field(True, description="False: it needs no behaviour log-probs.")

    @property
    def has_ratio(self) -> bool:
        """As its settings say."""
        return self.uses_ratio


LossSettings = Annotated[
    OnlineDPO
    | IPO
    | CoPG
    | BestOfN
    | VarGrad
    | RLOO
    | ProximalRLOO
    | PPO
    | GRPO
    | DrGRPO
    | DAPO
    | CISPO
    | GSPO
    | DecoupledPPO
    | TOPR
    | M2PO
    | VESPO
    | CustomLoss,
    Field(discriminator="name"),
]


class TruncatedIS(Settings):
    """Truncated importance sampling: each token's term times min(pi_old / mu, cap)."""

    name: Literal["tis"]
    cap: float = Field(2.0, gt=0, description="Largest weight.")


class MaskedIS(Settings):
    """Masked importance sampling (IcePop): pi_old / mu per token, 0 outside low .. high."""

    name: Literal["masked_is"]
    low: float = Field(0.5, ge=0, description="Smallest weight that counts.")
    high: float = Field(5.0, gt=0, description="Largest weight that counts.")


class SequenceIS(Settings):
    """pi_old / mu of whole completions, cut to low .. high or left out beyond."""

    name: Literal["sequence_is"]
    mode: Literal["truncate", "mask"] = Field(
        "truncate", description="Beyond low and high: cut to them, or 0."
    )
    low: float = Field(0.0, ge=0, description="Smallest weight.")
    high: float = Field(3.0, gt=0, description="Largest weight.")


class SequenceMask(Settings):
    """Off-policy sequence mask (DeepSeek-V3.2): leaves out bad completions that the policy moved away from."""

    name: Literal["sequence_mask"]
    delta: float = Field(
        0.5,
        ge=0,
        description="Largest mean of log mu - log pi_old where the advantage is negative.",
    )


CorrectionSettings = Annotated[
    TruncatedIS | MaskedIS | SequenceIS | SequenceMask, Field(discriminator="name")
]


def check_corrections(loss: LossBase, corrections: list[CorrectionSettings]) -> None:
    """ValueError when a correction has nothing to correct in the loss, or corrects it a second time."""
    name = getattr(loss, "name", type(loss).__name__)
    for correction in corrections:
        if not loss.has_ratio:
            raise ValueError(
                f"corrections: {correction.name} weights the terms of a policy gradient, but the loss {name} has no "
                "ratio to the policy that sampled; remove corrections, or choose a loss that has one"
            )
        if loss.ratio_to == "behaviour" and correction.name != "sequence_mask":
            raise ValueError(
                f"corrections: the loss {name} takes its ratio to the generator's log-probs, so {correction.name} "
                "would correct twice; remove it"
            )
    names = [correction.name for correction in corrections]
    weights = [given for given in names if given != "sequence_mask"]
    if len(set(names)) < len(names) or len(weights) > 1:
        raise ValueError(
            f"corrections: {', '.join(names)} would weight by pi_old / mu more than once; keep one of them"
        )
