"""Settings of the generator, the reward worker, and the checkpoint service."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from offbeat.config.base import Settings
from offbeat.config.service import RpcSettings


class VllmEngine(Settings):
    """vLLM, on GPUs or a CPU."""

    name: Literal["vllm"]
    max_num_seqs: int = Field(128, ge=1, description="Completions that run at once.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share one copy of the model.")
    data_parallel_size: int = Field(1, ge=1, description="Copies of the model in this process.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="GPU only.")
    kv_cache_memory_mb: int | None = Field(
        None, gt=0, description="KV cache, MiB; null: from gpu_memory_utilization, 128 on a CPU."
    )
    enforce_eager: bool | None = Field(None, description="null: true on a CPU, false on GPUs.")
    weight_transfer: Literal["file", "nccl"] = Field(
        "file",
        description="How vLLM's workers get staged weights: each reads the file, or the generator sends them by vLLM's "
        "own NCCL transfer, for workers on several hosts. nccl is UNTESTED ON GPUS.",
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's engine."
    )


class TransformersEngine(Settings):
    """Plain transformers: slow; for machines on which vLLM has no build."""

    name: Literal["transformers"]
    max_num_seqs: int = Field(32, ge=1, description="Completions that run at once.")


class DeterministicEngine(Settings):
    """No model: tokens are a function of weights digest, ordinal and seed. For fault tests."""

    name: Literal["deterministic"]
    max_num_seqs: int = Field(32, ge=1, description="Completions that run at once.")
    min_tokens: int = Field(1, ge=1, description="Shortest completion.")
    token_seconds: float = Field(0.0, ge=0, description="Time per token.")


EngineSettings = Annotated[
    VllmEngine | TransformersEngine | DeterministicEngine, Field(discriminator="name")
]


class GeneratorSettings(Settings):
    """The generator's settings."""

    engine: EngineSettings = VllmEngine(name="vllm")
    replicas: int = Field(1, ge=0, description="Processes that `offbeat run` starts.")
    devices: list[int] | None = Field(
        None,
        min_length=1,
        description="GPUs of this machine that `offbeat run` shares out to the replicas; null: all are visible.",
    )
    weight_update: Literal["in_flight", "drain"] = Field(
        "in_flight",
        description="Whether running completions go on over a weight update or end before it.",
    )
    kv_on_update: Literal["keep", "recompute"] | None = Field(
        None,
        description="KV cache of running completions at an in-flight update; null: keep.",
    )
    parity_tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest difference of a log-prob to the learner's after an update, nats; the mean may be a tenth "
        "of it. Null: 0.001 in float32, 1 in bfloat16.",
    )
    staging_directory: str | None = Field(
        None,
        description="Where weights are staged; null: /dev/shm when it has room, else the run's folder.",
    )
    evaluation_hold_seconds: float = Field(
        60.0,
        ge=0,
        description="Longest time for which evaluations of the version held put a weight update off.",
    )
    stall_seconds: float = Field(
        120.0,
        gt=0,
        description="No step of the engine for so long while work is under way: not alive; twice as long: ends.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; null: shared out.")
    checkpoint_addresses: list[str] = Field(
        default_factory=list,
        description=(
            "HOST:PORT of relays, the nearest first: the next one is used when one is away; after them the "
            "checkpoint service itself. Empty: that one only."
        ),
    )
    rpc: RpcSettings = RpcSettings()

    @model_validator(mode="after")
    def _kv_used(self) -> "GeneratorSettings":
        if self.kv_on_update is not None and self.weight_update == "drain":
            raise ValueError("kv_on_update is not used with weight_update: drain; remove it")
        return self


class RewardFunction(Settings):
    """One component of the reward: a built-in by `name`, or your own by `path`."""

    name: str = Field(description="Name of a built-in, or the component's name when path is given.")
    path: str | None = Field(None, description="module:function, or file.py:function.")
    weight: float = Field(
        1.0, allow_inf_nan=False, description="Its factor in the sum that is the reward."
    )
    use: Literal["both", "evaluation"] = Field(
        "both",
        description="evaluation: called for held-out tasks only, reported, and never part of the total.",
    )
    parts: list[str] | None = Field(
        None, min_length=1, description="Parts of a mixture that it scores; null: all."
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the built-in or function."
    )

    @model_validator(mode="after")
    def _weight_used(self) -> "RewardFunction":
        if self.use == "evaluation" and "weight" in self.model_fields_set and self.weight != 1.0:
            raise ValueError(
                f"weight: not used with use: evaluation, which never enters the total; found {self.weight:g}, remove it"
            )
        return self


class RewardSettings(Settings):
    """The reward worker's settings."""

    functions: list[RewardFunction] = Field(min_length=1)
    replicas: int = Field(1, ge=0, description="Processes that `offbeat run` starts.")
    devices: list[int] | None = Field(
        None,
        min_length=1,
        description="GPUs of this machine that `offbeat run` shares out to the replicas; null: all are visible.",
    )
    max_groups: int = Field(16, ge=1, description="Groups scored together.")
    threads: int | None = Field(None, ge=1, description="CPU threads; null: shared out.")
    timeout_seconds: float = Field(
        300.0, gt=0, description="Longest time of one call of a function."
    )
    rpc: RpcSettings = RpcSettings()

    @model_validator(mode="after")
    def _names_differ(self) -> "RewardSettings":
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise ValueError(f"two reward functions have the same name: {names}; names must differ")
        return self

    @model_validator(mode="after")
    def _something_to_train_on(self) -> "RewardSettings":
        if all(function.use == "evaluation" for function in self.functions):
            raise ValueError(
                "every function has use: evaluation, so training has no reward; add one"
            )
        return self


class CheckpointServiceSettings(Settings):
    """The checkpoint service's settings."""

    address: str | None = Field(
        None, description="HOST:PORT of a running service; null: `offbeat run` starts one."
    )
    directory: str | None = Field(
        None, description="Where versions are kept; null: in the run's folder."
    )
    keep_versions: int = Field(3, ge=1, description="Newest versions whose bytes are kept.")
    lease_seconds: float = Field(
        600.0, gt=0, description="Longest time that an open fetch keeps its version."
    )
    deltas: bool = Field(
        True,
        description=(
            "Send what changed since the version before, where that is less. The learner, this service and each "
            "generator keep one more copy of the weights in memory for it."
        ),
    )
    same_host_files: bool = Field(
        True,
        description="Let receivers on this service's host read its files instead of a copy.",
    )
    upstream: str | None = Field(
        None,
        description="HOST:PORT of a service that this one mirrors: it is a relay then, and takes no publishes.",
    )
    rpc: RpcSettings = RpcSettings()
