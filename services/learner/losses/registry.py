"""From settings to a loss."""

from __future__ import annotations

from offbeat.config.learner import LossSettings
from services.learner.losses.base import Loss


def build_loss(settings: LossSettings) -> Loss:
    """The loss of the recipe. ConfigError when a custom one can't be imported or does not fit `Loss`."""
    raise NotImplementedError
