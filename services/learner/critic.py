"""PPO's critic as a model of its own: built, run, trained, saved. The trainer uses it.

A critic that is a head on the policy is `logprobs.TokenScorer` with `value_head`.

Legend: B rows, S positions of prompt and completion, T completion positions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.config import Recipe
from offbeat.config.losses import PPO
from offbeat.errors import ModelError
from services.learner import state
from services.learner.batching import StepBatch, Unit, rows_in
from services.learner.engine import Engine
from services.learner.logprobs import completions
from services.learner.losses.ppo import PPOLoss
from services.learner.model import made_trainable, without_dropout
from services.learner.scoring import Passes
from services.learner.step import StepState

log = logging.getLogger(__name__)

FOLDER = "critic"
"""Where the critic's state lies in a checkpoint."""


class ValueScorer(nn.Module):
    """A sequence-classification model whose head gives a value at each position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens_B_S: Tensor,
        prompt_B: Tensor,
        completion_B: Tensor,
        first: int,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """(values, values without gradient), (B, T) float32: of the state before each completion token."""
        hidden_B_S_H = self.model.base_model(input_ids=tokens_B_S, use_cache=False)[0]
        values_B_L = self.model.score(hidden_B_S_H[:, first - 1 : -1])[..., 0].float()
        values_B_T = completions(values_B_L, prompt_B - first, completion_B)
        return values_B_T, values_B_T.detach()


def load_critic(folder: str | Path, *, dtype: str) -> nn.Module:
    """A sequence-classification model with one output from a folder: a reward model, or a policy.

    A policy has no head; it then starts at 0, so that the first values are 0. ModelError when the
    folder can't be loaded that way.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, num_labels=1)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            str(folder),
            config=without_dropout(config),
            dtype=getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"{folder}: expected a model that can be PPO's critic (a reward model or a policy), found: {error}"
        ) from error
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{folder}: expected a sequence-classification model with a linear `score` head, found "
            f"{type(model).__name__}; use learner.loss.critic: shared_head"
        )
    missing = sorted(report["missing_keys"])
    if any(not name.startswith("score.") for name in missing):
        raise ModelError(
            f"{folder}: {len(missing)} weights are missing, such as {missing[0]}; save it again"
        )
    if missing:
        nn.init.zeros_(head.weight)
    return made_trainable(model)


class Critic:
    """A critic with a DeepSpeed engine of its own, of the policy's ZeRO stage. All methods are collective."""

    def __init__(self, recipe: Recipe, loss: PPOLoss, passes: Passes) -> None:
        settings = loss.settings
        assert isinstance(settings, PPO)
        dtype = recipe.model.dtype
        model = load_critic(settings.critic_model or recipe.model.path, dtype=dtype)
        if recipe.learner.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._engine = Engine(ValueScorer(model), recipe.learner, dtype, passes.device)
        self._loss, self._passes = loss, passes
        self._rate = (
            settings.critic_lr or recipe.learner.optimizer.lr
        ) / recipe.learner.optimizer.lr

    def values(self, batch: StepBatch, rows: Sequence[int]) -> np.ndarray:
        """Values of the rows' tokens, flat."""
        return self._passes.score(self._engine.scorer, batch, rows)

    def update(self, step: StepState, units: Sequence[Unit], scale: float, rate: float) -> None:
        """One optimizer update on an update's rows; `rate`: the policy's learning rate."""
        share = self._passes.share(step.batch, units)
        for number, micro_batch in enumerate(share):
            rows = rows_in(micro_batch)
            values_B_T, _ = self._engine.score(*self._passes.arguments(step.batch, rows))
            loss = values_B_T.sum() * 0.0
            if rows:
                assert step.preparation is not None
                output = self._loss.value_terms(
                    values_B_T, *step.preparation.value_targets(rows, values_B_T)
                )
                loss = output.terms.sum() * scale
                step.count(output)
            self._engine.backward(loss, last=number == len(share) - 1)
        step.critic_grad_norms.append(self._engine.step(rate * self._rate))

    def save(self, folder: Path, scalars: dict[str, Any]) -> None:
        """Writes its state below a checkpoint's folder, with the trainer's scalars; rank 0 writes."""
        state.save(folder / FOLDER, self._engine, scalars)

    def load(self, folder: Path) -> None:
        """Restores its state. A checkpoint of another loss has none: the critic starts anew then."""
        if not (folder / FOLDER).is_dir():
            log.warning(
                "%s holds no critic, as it was made with another loss: it starts anew", folder
            )
            return
        state.read(folder / FOLDER, self._engine)

    def close(self) -> None:
        """Frees the engine."""
        self._engine.close()
