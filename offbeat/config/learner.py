"""Settings of the learner: optimizer, batching, checkpoints; the losses have a module of their own."""

from typing import Literal

from pydantic import Field, model_validator

from offbeat.config.base import Settings
from offbeat.config.health import AlarmSettings
from offbeat.config.losses import (
    CorrectionSettings,
    LossSettings,
    PolicyGradient,
    check_corrections,
)
from offbeat.config.service import RpcSettings


class OptimizerSettings(Settings):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="linear and cosine fall to 0 at the last step."
    )
    schedule_per: Literal["update", "step"] = Field(
        "update",
        description="When the rate changes. step: once before each step, as in the paper's code, whose last step "
        "has the rate 0 and whose mean rate falls with the number of updates per step.",
    )
    warmup_updates: int = Field(0, ge=0, description="Updates from 0 to the peak.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Of AdamW.")
    eps: float = Field(1e-8, gt=0, description="Of AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Gradient clipping; null: none.")

    @model_validator(mode="after")
    def _warmup_used(self) -> "OptimizerSettings":
        if self.schedule_per == "step" and self.warmup_updates:
            raise ValueError(
                "warmup_updates is not used with schedule_per: step, which has no warm-up; remove one of them"
            )
        return self


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

    every_steps: int = Field(20, ge=1, description="After so many steps,")
    every_minutes: float = Field(10.0, gt=0, description="or so many minutes, if that is sooner.")
    max_unsettled_bytes: int = Field(
        256 * 1024**2, gt=0, description="Payload that may wait for a checkpoint, in bytes."
    )
    keep: int = Field(2, ge=1, description="Number of committed checkpoints kept.")


class LearnerSettings(Settings):
    """The learner's settings."""

    loss: LossSettings
    corrections: list[CorrectionSettings] = Field(
        default_factory=list,
        description="Weights by pi_old / mu for the terms of a policy gradient.",
    )
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
    logprob_temperature: float | None = Field(
        None,
        gt=0,
        description="Temperature of the policy's and the reference's log-probs; null: sampling.temperature, as in the "
        "paper (TRL's online DPO: 1). Losses without a ratio only.",
    )
    mask_truncated: bool = Field(
        False,
        description="Train on no token of a completion that was cut off (DAPO's overlong filtering).",
    )
    ranks: int = Field(1, ge=1, description="Number of processes.")
    devices: list[int] | None = Field(
        None,
        min_length=1,
        description="GPUs of this machine that `offbeat run` gives to the ranks, one each; null: all are visible.",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="What DeepSpeed shards over the ranks: optimizer, gradients, weights."
    )
    gradient_checkpointing: bool = Field(
        False, description="Less memory for activations, more computation."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads per rank; null: shared out.")
    filter_equal_groups: bool = Field(
        False,
        description="Leave groups whose rewards are all equal out of the step, and out of its denominator.",
    )
    permute_rewards: bool = Field(
        False, description="Control experiment: permute the rewards of each step at random."
    )
    alarms: AlarmSettings = AlarmSettings()
    rpc: RpcSettings = RpcSettings()

    @property
    def updates_per_step(self) -> int:
        """N * T."""
        return self.batching.mini_batches * self.batching.passes

    @property
    def has_ratio(self) -> bool:
        """Whether the loss uses a ratio to the behaviour or the old policy."""
        return self.loss.has_ratio

    @model_validator(mode="after")
    def _old_logprobs_used(self) -> "LearnerSettings":
        if self.old_logprobs is not None and not self.has_ratio:
            raise ValueError(f"old_logprobs is not used by the loss {self.loss.name}; remove it")
        if self.old_logprobs == "behaviour" and self.corrections:
            raise ValueError(
                "corrections weight by pi_old / mu, which is 1 with old_logprobs: behaviour; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _options_fit_the_loss(self) -> "LearnerSettings":
        if self.logprob_temperature is not None and self.has_ratio:
            raise ValueError(
                f"logprob_temperature: the loss {self.loss.name} takes a ratio to log-probs at sampling.temperature; "
                "remove it"
            )
        if self.mask_truncated and not isinstance(self.loss, PolicyGradient):
            raise ValueError(
                f"mask_truncated: the loss {self.loss.name} compares whole completions, and one without tokens "
                "compares with nothing; remove it"
            )
        return self

    @model_validator(mode="after")
    def _corrections_fit(self) -> "LearnerSettings":
        check_corrections(self.loss, self.corrections)
        return self
