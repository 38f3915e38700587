"""From settings to a loss. To add one: a file here, a settings class, a line in `_BUILDERS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offbeat.config.learner import RLOO, CustomLoss, LossSettings, OnlineDPO, ProximalRLOO
from offbeat.errors import ConfigError
from offbeat.imports import load_callable
from services.learner.losses.base import Loss
from services.learner.losses.online_dpo import OnlineDPOLoss
from services.learner.losses.rloo import ProximalRLOOLoss, RLOOLoss


def build_loss(settings: LossSettings) -> Loss:
    """The loss of the recipe. ConfigError when a custom one can't be imported or does not fit `Loss`."""
    return _BUILDERS[type(settings)](settings)


def _custom(settings: CustomLoss) -> Loss:
    factory = load_callable(settings.path, key="learner.loss.path")
    try:
        loss = factory(**settings.params)
    except TypeError as error:
        raise ConfigError(
            f"learner.loss.params: {settings.path} can't be called with {sorted(settings.params)}: "
            f"{error}; give the arguments that it takes"
        ) from error
    if not isinstance(loss, Loss):
        wanted = ["needs_reference", "needs_old", "normalise_by", "metric_names", "units"]
        missing = [name for name in wanted if not hasattr(loss, name)]
        raise ConfigError(
            f"learner.loss.path: expected {settings.path} to return a callable with {', '.join(wanted)} "
            f"(see services.learner.losses.base.Loss), found {type(loss).__name__} without "
            f"{', '.join(missing) or 'a way to be called'}"
        )
    return loss


_BUILDERS: dict[type, Callable[[Any], Loss]] = {
    OnlineDPO: lambda settings: OnlineDPOLoss(settings.beta),
    RLOO: lambda settings: RLOOLoss(settings.kl_coef),
    ProximalRLOO: lambda settings: ProximalRLOOLoss(settings.kl_coef, settings.clip),
    CustomLoss: _custom,
}
