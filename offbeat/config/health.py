"""Thresholds of the alarms about learning. What each suspects and advises: services/learner/health.py."""

from pydantic import Field

from offbeat.config.base import Settings


class AlarmSettings(Settings):
    """When a step's metrics raise an alarm; null: never. An alarm is logged and counted, and changes nothing."""

    mismatch_kl: float | None = Field(
        0.01,
        gt=0,
        description="Above: KL between engine and learner at one version, nats per token.",
    )
    drift_kl: float | None = Field(
        0.1, gt=0, description="Above: KL from the policy that sampled, nats per token."
    )
    kl: float | None = Field(
        50.0, gt=0, description="Above: KL to the reference, nats per completion."
    )
    ess: float | None = Field(
        0.3, gt=0, description="Below: effective sample size, as a fraction of the completions."
    )
    clip_fraction: float | None = Field(0.4, gt=0, description="Above: share that clipping holds.")
    entropy: float | None = Field(0.01, gt=0, description="Below: nats per token.")
    eos_rate: float | None = Field(
        0.5, gt=0, description="Below: share of completions that end by themselves."
    )
    informative_fraction: float | None = Field(
        0.1, gt=0, description="Below: share of groups with a gradient."
    )
    grad_norm: float | None = Field(1000.0, gt=0, description="Above: norm before clipping.")
    dead_fraction: float | None = Field(
        0.2, gt=0, description="Above: share of a cohort's groups that were given up."
    )
