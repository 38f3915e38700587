"""Losses: a file each, small pure functions on tensors; `base.Loss` is the port, `registry.build_loss` the factory."""

from services.learner.losses.base import (
    Constants,
    Loss,
    LossInputs,
    LossOutput,
    PreparedLoss,
    ValueLoss,
)
from services.learner.losses.registry import build_loss

__all__ = [
    "Constants",
    "Loss",
    "LossInputs",
    "LossOutput",
    "PreparedLoss",
    "ValueLoss",
    "build_loss",
]
