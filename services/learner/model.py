"""Loading and checking of model folders. The trainer, the data set and the learner's start-up use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelInfo:
    """What the configuration of a model folder says. `context`: positions, None when unlimited."""

    folder: Path
    vocabulary: int
    context: int | None
    tied_embeddings: bool


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. ModelError when there is none or when it has no end-of-sequence token."""
    raise NotImplementedError


def check_model(folder: str | Path, *, max_context: int | None = None) -> ModelInfo:
    """Reads a model folder's configuration, not its weights.

    ModelError: the folder, its config.json, or its weights are missing, it is no causal language model.
    ConfigError: `max_context` is more than the model has positions.
    """
    raise NotImplementedError


def load_policy(folder: str | Path, *, dtype: str = "float32") -> PreTrainedModel:
    """The causal language model of a folder, on the CPU, in eval mode, dropout 0. ModelError when it can't be loaded."""
    raise NotImplementedError
