"""Settings that every service has: its gRPC port, logs, metrics; and those of Redis."""

from typing import Literal

from pydantic import Field, model_validator

from offbeat.config.base import Settings


class RpcSettings(Settings):
    """A service's gRPC port. `advertise` is what others dial, which is not what a server binds to."""

    bind: str = Field(
        "127.0.0.1:0", description="HOST:PORT to listen on; port 0: the system chooses."
    )
    advertise: str | None = Field(
        None,
        description="HOST:PORT told to others; null: the bound address (0.0.0.0 becomes the host's name).",
    )
    reflection: bool = Field(True, description="Serve gRPC reflection, for grpcurl and the like.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Prometheus port; null: none."
    )
    drain_seconds: float = Field(20.0, gt=0, description="Time given to work under way on SIGTERM.")


class SamplesSettings(Settings):
    """Which completions are kept as text in the run's folder (samples.jsonl), for people to read."""

    groups_per_step: int = Field(4, ge=0, description="Trained groups kept of each step.")
    evaluation_prompts: int = Field(
        64, ge=0, description="Prompts kept of each evaluation: its first ones."
    )
    max_characters: int = Field(
        4000, gt=0, description="Longer prompts and completions are cut there."
    )
    max_mb: int = Field(
        16, gt=0, description="Largest file, MiB; a larger one is thinned out to half of it."
    )


class TelemetrySettings(Settings):
    """Logs, metrics, samples."""

    log_format: Literal["human", "json"] = Field("human", description="Of each process's log.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="The least that is logged."
    )
    tensorboard: bool = Field(
        True, description="Write TensorBoard event files. metrics.jsonl is written always."
    )
    samples: SamplesSettings = SamplesSettings()


class RedisSettings(Settings):
    """The sample streams' server."""

    url: str | None = Field(
        None, description="redis://HOST:PORT/DB; null: `offbeat run` starts an embedded server."
    )
    password_file: str | None = Field(
        None,
        description="File with the server's password, such as a mounted secret; null: the one in url, or none.",
    )
    min_idle_seconds: float = Field(
        30.0,
        gt=0,
        description="Entries of a worker without a sign of life for this long are claimed by others.",
    )
    beat_seconds: float = Field(5.0, gt=0, description="Time between heartbeats of a worker.")
    max_hold_seconds: float = Field(
        600.0,
        gt=0,
        description="Longest time that a worker may hold one entry, in spite of heartbeats.",
    )
    outage_seconds: float = Field(
        300.0,
        gt=0,
        description="How long a Redis that is away is waited for; then the process gives up.",
    )
    embedded_max_memory_mb: int = Field(
        1024, gt=0, description="maxmemory of the embedded server, MiB."
    )

    @model_validator(mode="after")
    def _beats_in_time(self) -> "RedisSettings":
        if self.min_idle_seconds < 2 * self.beat_seconds:
            raise ValueError(
                f"min_idle_seconds: expected at least two heartbeats (2 * beat_seconds = {2 * self.beat_seconds:g}), "
                f"found {self.min_idle_seconds:g}: others would claim what a living worker holds; raise it, or lower "
                "beat_seconds"
            )
        return self
