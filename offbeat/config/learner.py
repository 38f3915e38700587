"""Settings of the learner: loss, optimizer, batching, checkpoints."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from offbeat.config.base import Settings
from offbeat.config.service import RpcSettings


class OnlineDPO(Settings):
    """Online DPO on the best and the worst of k (arXiv 2410.18252; DPO: arXiv 2305.18290)."""

    name: Literal["online_dpo"]
    beta: float = Field(0.1, gt=0, description="Strength of the pull to the reference.")


class RLOO(Settings):
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740)."""

    name: Literal["rloo"]
    kl_coef: float = Field(0.05, ge=0, description="Weight of the sequence KL (k1) in the reward.")


class ProximalRLOO(Settings):
    """RLOO with a clipped sequence ratio to the policy at the step's start."""

    name: Literal["proximal_rloo"]
    kl_coef: float = Field(0.05, ge=0, description="Weight of the sequence KL (k1) in the reward.")
    clip: float = Field(0.2, gt=0, lt=1, description="The ratio is clipped to 1 ± clip.")


class CustomLoss(Settings):
    """A loss of your own: a callable with the signature of `services.learner.losses.base.Loss`."""

    name: Literal["custom"]
    path: str = Field(description="module:factory, or file.py:factory; called with params.")
    params: dict[str, Any] = Field(default_factory=dict)
    uses_ratio: bool = Field(True, description="False: it needs no behaviour log-probs.")


LossSettings = Annotated[OnlineDPO | RLOO | ProximalRLOO | CustomLoss, Field(discriminator="name")]


class OptimizerSettings(Settings):
    """AdamW and its schedule. The schedule steps once per optimizer update."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_updates: int = Field(0, ge=0, description="Updates from 0 to the peak.")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0, description="Gradient clipping; null: none.")


class BatchingSettings(Settings):
    """How a step's completions are cut into mini-batches and micro-batches. Results do not depend on the latter."""

    mini_batches: int = Field(1, ge=1, description="N: updates per pass over a step's groups.")
    passes: int = Field(1, ge=1, description="T: passes over a step's groups.")
    micro_batch_tokens: int = Field(
        8192, gt=0, description="Largest padded number of tokens of one forward pass, per rank."
    )
    bucket_by_length: bool = Field(True, description="Put completions of like length together.")


class LoraSettings(Settings):
    """LoRA instead of training every weight. Versions, checkpoints and `best` then hold the adapter alone."""

    r: int | None = Field(None, ge=1, description="Rank; null: 16, or that of `adapter`.")
    alpha: float | None = Field(
        None, gt=0, description="The update is alpha / r * B A; null: 2 r, or that of `adapter`."
    )
    target_modules: list[str] | Literal["all-linear"] | None = Field(
        None,
        description="Names of linear layers, such as q_proj; null: all-linear (not the head), or those of `adapter`.",
    )
    adapter: str | None = Field(
        None, description="PEFT adapter folder to go on from; null: a new adapter."
    )

    @property
    def rank(self) -> int:
        """Rank of a new adapter."""
        return self.r or 16

    @property
    def scale(self) -> float:
        """Alpha of a new adapter."""
        return self.alpha or 2.0 * self.rank

    @property
    def modules(self) -> list[str] | str:
        """Layers of a new adapter."""
        return self.target_modules or "all-linear"

    @model_validator(mode="after")
    def _adapter_says_all(self) -> "LoraSettings":
        given = [n for n in ("r", "alpha", "target_modules") if getattr(self, n) is not None]
        if self.adapter is not None and given:
            raise ValueError(
                f"{', '.join(given)} would have no effect: adapter has its own; remove one of them"
            )
        return self


class LearnerCheckpointSettings(Settings):
    """When the learner saves itself. Entries of a cohort are settled once a checkpoint contains its step."""

    every_steps: int = Field(20, ge=1)
    every_minutes: float = Field(10.0, gt=0)
    max_unsettled_bytes: int = Field(
        256 * 1024**2, gt=0, description="Payload that may wait for a checkpoint, in bytes."
    )
    keep: int = Field(2, ge=1, description="Number of committed checkpoints kept.")


class LearnerSettings(Settings):
    """The learner's settings."""

    loss: LossSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    batching: BatchingSettings = BatchingSettings()
    checkpoints: LearnerCheckpointSettings = LearnerCheckpointSettings()
    lora: LoraSettings | None = Field(None, description="null: every weight is trained.")
    reference: str | None = Field(
        None, description="Folder of the reference model; null: the policy as it was at the start."
    )
    old_logprobs: Literal["recompute", "behaviour"] | None = Field(
        None,
        description="pi_old: recomputed by the learner at the step's start, or the generator's log-probs; "
        "null: recompute. Losses with a ratio only.",
    )
    allow_biased_ratio: bool = Field(
        False, description="Accept top_p, top_k, min_p with a loss that has a probability ratio."
    )
    ranks: int = Field(1, ge=1, description="Number of processes.")
    zero_stage: Literal[0, 1, 2, 3] = 0
    gradient_checkpointing: bool = False
    threads: int | None = Field(None, ge=1, description="CPU threads per rank; null: shared out.")
    filter_equal_groups: bool = Field(
        False,
        description="Leave groups whose rewards are all equal out of the step, and out of its denominator.",
    )
    permute_rewards: bool = Field(
        False, description="Control experiment: permute the rewards of each step at random."
    )
    mismatch_kl_alarm: float = Field(
        0.01,
        gt=0,
        description="Alarm above this KL between engine and learner at one version, nats.",
    )
    rpc: RpcSettings = RpcSettings()

    @property
    def updates_per_step(self) -> int:
        """N * T."""
        return self.batching.mini_batches * self.batching.passes

    @property
    def has_ratio(self) -> bool:
        """Whether the loss uses a ratio to the behaviour or the old policy."""
        if isinstance(self.loss, CustomLoss):
            return self.loss.uses_ratio
        return not isinstance(self.loss, OnlineDPO)

    @model_validator(mode="after")
    def _old_logprobs_used(self) -> "LearnerSettings":
        if self.old_logprobs is not None and not self.has_ratio:
            raise ValueError(f"old_logprobs is not used by the loss {self.loss.name}; remove it")
        return self
