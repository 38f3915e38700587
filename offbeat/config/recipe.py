"""The recipe: everything that a run needs to know, and which combinations make no sense."""

import math
from typing import Literal

from pydantic import Field, model_validator

from offbeat.config.base import Settings
from offbeat.config.data import DataSettings
from offbeat.config.learner import LearnerSettings
from offbeat.config.service import RedisSettings, TelemetrySettings
from offbeat.config.workers import CheckpointServiceSettings, GeneratorSettings, RewardSettings


class RunSettings(Settings):
    """The run as a whole."""

    name: str = Field(
        "run", pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$", description="Part of the run's id."
    )
    id: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,95}$",
        description="The run's id; null: name and time.",
    )
    seed: int = Field(0, ge=0, description="Seed of data order, sampling, and initialisation.")
    directory: str = Field("runs", description="Folder of all runs.")
    max_restart_seconds: float = Field(
        30.0,
        gt=0,
        description="Longest time that `offbeat run` waits before it starts a crashed process again.",
    )
    max_quick_crashes: int = Field(
        5,
        ge=1,
        description="`offbeat run` gives up when a process crashed so often in a row, each time within a minute.",
    )


class ModelSettings(Settings):
    """The policy."""

    path: str = Field(
        description="Hugging Face folder, absolute or relative to the recipe's folder."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Type of the published weights and of the generator."
    )
    max_context: int = Field(1024, gt=0, description="Prompt and completion together, in tokens.")


class SamplingSettings(Settings):
    """How training completions are sampled."""

    k: int = Field(2, ge=1, description="Completions per prompt.")
    temperature: float = Field(1.0, gt=0, description="Of the sampling, and of all log-probs.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the likeliest tokens of this total probability."
    )
    top_k: int = Field(0, ge=0, description="Sample from so many likeliest tokens; 0: from all.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Leave out tokens below this share of the likeliest one."
    )
    max_tokens: int = Field(gt=0, description="Longest completion, in tokens.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a completion.")

    @property
    def biased(self) -> bool:
        """Whether the behaviour policy is not the softmax of the logits over the whole vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class ScheduleSettings(Settings):
    """Steps and staleness."""

    steps: int = Field(gt=0, description="Number of steps of the run.")
    prompts_per_step: int = Field(gt=0, description="P: groups that one step trains.")
    max_lag: int = Field(1, ge=0, description="Oldest weights that a step may train on, in steps.")
    lag_mode: Literal["at_most", "exact"] = Field(
        "at_most", description="exact: always max_lag, less only in the first steps."
    )
    oversample: float = Field(
        1.0,
        ge=1,
        description="A step's cohort is issued so much larger than prompts_per_step; the first groups with a signal "
        "are trained (dynamic sampling). Needs learner.filter_equal_groups.",
    )
    group_deadline_seconds: float = Field(
        600.0,
        gt=0,
        description="A group that takes a generator longer is given up (an empty place in its step).",
    )

    @property
    def cohort_size(self) -> int:
        """Ordinals of a step: prompts_per_step times oversample, rounded up."""
        return math.ceil(self.prompts_per_step * self.oversample)


class EvaluationSettings(Settings):
    """Held-out evaluation during the run."""

    every_steps: int | None = Field(None, gt=0, description="null: not by steps.")
    every_minutes: float | None = Field(None, gt=0, description="null: not by time.")
    at_start: bool = Field(True, description="Evaluate the start policy.")
    at_end: bool = Field(True, description="Evaluate the trained policy.")
    prompts: int = Field(1000, gt=0, description="Held-out prompts at the start and at the end.")
    prompts_during: int = Field(
        256, gt=0, description="Held-out prompts of the evaluations in between."
    )
    greedy: bool = Field(True, description="Evaluate greedily: pass@1.")
    sampled: bool = Field(True, description="Evaluate at the training temperature: pass@1, pass@k.")
    k: int = Field(1, ge=1, description="Completions per prompt of the sampled evaluation.")
    max_tokens: int | None = Field(
        None, gt=0, description="Longest held-out completion, in tokens; null: sampling.max_tokens."
    )
    pass_threshold: float | None = Field(
        1.0,
        description="A completion passes when its total score reaches this; null: nothing passes or fails, "
        "the mean reward is what counts.",
    )
    timeout_seconds: float = Field(600.0, gt=0, description="Longest wait for the results.")


class PrepareSettings(Settings):
    """How `offbeat prepare` makes the start policy where the folder is not there yet."""

    kind: Literal["sft", "gguf", "hub", "tldr"] = Field(
        "sft",
        description="sft: supervised training of a small policy; gguf: the model in a GGUF file; "
        "hub: the policy, and further models, from the Hugging Face hub; "
        "tldr: data, policy and proxy reward model, in the folder around the policy's.",
    )
    params: dict[str, object] = Field(
        default_factory=dict, description="Of that kind; the recipes in recipes/ show them."
    )

    @property
    def makes_data(self) -> bool:
        """Whether the run's data is made too, so that it need not be there before."""
        return self.kind == "tldr"


class Recipe(Settings):
    """A whole run."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    prepare: PrepareSettings | None = None
    data: DataSettings
    sampling: SamplingSettings
    schedule: ScheduleSettings
    evaluation: EvaluationSettings | None = None
    learner: LearnerSettings
    generator: GeneratorSettings = GeneratorSettings()
    reward: RewardSettings
    checkpoint: CheckpointServiceSettings = CheckpointServiceSettings()
    redis: RedisSettings = RedisSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @property
    def run_id(self) -> str:
        """The run's id; set by whoever starts the run."""
        if self.run.id is None:
            raise ValueError(
                "run.id is not set: `offbeat run` sets it, elsewhere give --set run.id=..."
            )
        return self.run.id

    @property
    def longest_completion(self) -> int:
        """Tokens of the longest completion, of training or evaluation."""
        evaluated = self.evaluation.max_tokens if self.evaluation is not None else None
        return max(self.sampling.max_tokens, evaluated or 0)

    @property
    def longest_prompt(self) -> int:
        """Tokens that the context leaves for a prompt."""
        return self.model.max_context - self.longest_completion

    @property
    def parity_tolerance(self) -> float:
        """Largest difference of a log-prob between generator and learner, nats.

        Two programs that compute one bfloat16 model differ by 0.05 on average and by 0.35 in the worst of 192 tokens
        (docs/results/smollm2.md), since activations have 8 significant bits; in float32 by 1e-5.
        """
        if self.generator.parity_tolerance is not None:
            return self.generator.parity_tolerance
        return 1e-3 if self.model.dtype == "float32" else 1.0

    @model_validator(mode="after")
    def _combinations(self) -> "Recipe":
        k, loss, least = self.sampling.k, self.learner.loss.name, self.learner.loss.min_k
        if k < least:
            raise ValueError(
                f"sampling.k is {k}, but learner.loss {loss} compares completions: set k >= {least}"
            )
        if self.learner.has_ratio and self.sampling.biased and not self.learner.allow_biased_ratio:
            raise ValueError(
                f"sampling.top_p, top_k, min_p cut the distribution, which biases the ratio of learner.loss {loss}: "
                "set them to 1, 0, 0, or learner.allow_biased_ratio: true"
            )
        if self.longest_prompt < 1:
            raise ValueError(
                f"sampling.max_tokens is {self.sampling.max_tokens}, model.max_context {self.model.max_context}, "
                f"completions have up to {self.longest_completion} tokens: no room is left for a prompt"
            )
        if self.evaluation is not None and self.data.heldout is None:
            raise ValueError("evaluation needs data.heldout: give it, or remove evaluation")
        if self.schedule.oversample > 1 and not self.learner.filter_equal_groups:
            raise ValueError(
                f"schedule.oversample is {self.schedule.oversample:g}, but nothing is filtered, so the surplus would "
                "be thrown away: set learner.filter_equal_groups: true, or oversample: 1"
            )
        if self.learner.batching.mini_batches > self.schedule.prompts_per_step:
            raise ValueError(
                f"learner.batching.mini_batches is {self.learner.batching.mini_batches}, more than "
                f"schedule.prompts_per_step = {self.schedule.prompts_per_step}"
            )
        return self

    @model_validator(mode="after")
    def _parts_and_rewards(self) -> "Recipe":
        names = self.data.part_names
        for function in self.reward.functions:
            unknown = [name for name in function.parts or () if name not in names]
            if unknown:
                raise ValueError(
                    f"reward function {function.name} has parts: {unknown[0]}, expected parts of a mixture in data "
                    f"({', '.join(names) or 'there is none'})"
                )
        for name in names:
            scored = [f for f in self.reward.functions if f.parts is None or name in f.parts]
            if all(function.use == "evaluation" for function in scored):
                raise ValueError(
                    f"no reward function scores the part {name}: add it to the parts of one"
                )
        return self
