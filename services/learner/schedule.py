"""The learning rate of each update. Pure; the trainer sets it before the optimizer's step."""

from __future__ import annotations

import math

from offbeat.config.learner import OptimizerSettings


def learning_rate(
    update: int, total: int, settings: OptimizerSettings, updates_per_step: int = 1
) -> float:
    """Learning rate of update 0, 1, ... of `total`.

    Per update it is never 0 within the run: warm-up starts at peak / (warmup_updates + 1), decay ends
    one update after the last one, so that every update moves the weights. Per step it is that of the
    paper's code, which moves on before each step: with a decay the last step's rate is 0.
    """
    if settings.schedule_per == "step":
        steps = max(1, total // updates_per_step)
        return _decayed(min(1.0, (update // updates_per_step + 1) / steps), settings)
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / (settings.warmup_updates + 1)
    decay = max(1, total - settings.warmup_updates)
    return _decayed(min(1.0, (update - settings.warmup_updates) / decay), settings)


def _decayed(gone: float, settings: OptimizerSettings) -> float:
    """The rate when a part `gone` of the decay is over, 0 .. 1."""
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "linear":
        return settings.lr * (1.0 - gone)
    return settings.lr * 0.5 * (1.0 + math.cos(math.pi * gone))
