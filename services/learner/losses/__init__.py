"""Losses: a file each, small pure functions on tensors; `base.Loss` is the port, `registry.build_loss` the factory."""

from services.learner.losses.base import Loss, LossInputs, LossOutput
from services.learner.losses.registry import build_loss

__all__ = ["Loss", "LossInputs", "LossOutput", "build_loss"]
