"""From settings to a loss. To add one: a file here, a settings class, a line in `_PLAIN` or `_POLICY_GRADIENTS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from offbeat.config import losses as settings_of
from offbeat.errors import ConfigError
from offbeat.imports import load_callable
from services.learner.losses.base import Loss
from services.learner.losses.best_of_n import BestOfNLoss
from services.learner.losses.cispo import CISPOLoss
from services.learner.losses.copg import CoPGLoss
from services.learner.losses.dapo import DAPOLoss
from services.learner.losses.decoupled_ppo import DecoupledPPOLoss
from services.learner.losses.dr_grpo import DrGRPOLoss
from services.learner.losses.grpo import GRPOLoss
from services.learner.losses.gspo import GSPOLoss
from services.learner.losses.ipo import IPOLoss
from services.learner.losses.m2po import M2POLoss
from services.learner.losses.online_dpo import OnlineDPOLoss
from services.learner.losses.policy_gradient import PolicyGradientLoss
from services.learner.losses.ppo import PPOLoss
from services.learner.losses.rloo import ProximalRLOOLoss, RLOOLoss
from services.learner.losses.topr import TOPRLoss
from services.learner.losses.vargrad import VarGradLoss
from services.learner.losses.vespo import VESPOLoss


def build_loss(
    settings: settings_of.LossSettings,
    *,
    corrections: Sequence[settings_of.CorrectionSettings] = (),
    max_tokens: int,
) -> Loss:
    """The loss of the recipe. ConfigError when a custom one can't be imported or does not fit `Loss`.

    `max_tokens`: longest completion, sampling.max_tokens.
    """
    if isinstance(settings, settings_of.PolicyGradient):
        family = _POLICY_GRADIENTS[type(settings)]
        return family(settings, corrections=corrections, max_tokens=max_tokens)
    if isinstance(settings, settings_of.CustomLoss):
        return _custom(settings, corrections)
    return _PLAIN[type(settings)](settings)


def _custom(
    settings: settings_of.CustomLoss, corrections: Sequence[settings_of.CorrectionSettings]
) -> Loss:
    if corrections:
        raise ConfigError(
            "learner.corrections: a custom loss applies its own; call services.learner.losses.corrections "
            "from its weights, and remove the setting"
        )
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


_PLAIN: dict[type, Callable[[Any], Loss]] = {
    settings_of.OnlineDPO: lambda settings: OnlineDPOLoss(settings.beta),
    settings_of.IPO: lambda settings: IPOLoss(settings.beta),
    settings_of.CoPG: lambda settings: CoPGLoss(settings.beta),
    settings_of.BestOfN: lambda settings: BestOfNLoss(),
    settings_of.VarGrad: lambda settings: VarGradLoss(settings.beta),
}

_POLICY_GRADIENTS: dict[type[settings_of.PolicyGradient], type[PolicyGradientLoss]] = {
    settings_of.RLOO: RLOOLoss,
    settings_of.ProximalRLOO: ProximalRLOOLoss,
    settings_of.PPO: PPOLoss,
    settings_of.GRPO: GRPOLoss,
    settings_of.DrGRPO: DrGRPOLoss,
    settings_of.DAPO: DAPOLoss,
    settings_of.CISPO: CISPOLoss,
    settings_of.GSPO: GSPOLoss,
    settings_of.DecoupledPPO: DecoupledPPOLoss,
    settings_of.TOPR: TOPRLoss,
    settings_of.M2PO: M2POLoss,
    settings_of.VESPO: VESPOLoss,
}
