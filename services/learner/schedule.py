"""The learning rate of each update. Pure; the trainer sets it before the optimizer's step."""

from __future__ import annotations

import math

from offbeat.config.learner import OptimizerSettings


def learning_rate(update: int, total: int, settings: OptimizerSettings) -> float:
    """Learning rate of update 0, 1, ... of `total`.

    Never 0 within the run: warm-up starts at peak / (warmup_updates + 1), decay ends one update
    after the last one, so that every update moves the weights.
    """
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / (settings.warmup_updates + 1)
    if settings.schedule == "constant":
        return settings.lr
    decay = max(1, total - settings.warmup_updates)
    left = 1.0 - min(1.0, (update - settings.warmup_updates) / decay)
    if settings.schedule == "linear":
        return settings.lr * left
    return settings.lr * 0.5 * (1.0 - math.cos(math.pi * left))
