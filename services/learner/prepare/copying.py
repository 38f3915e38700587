"""Sequences that repeat themselves: a new policy learns to copy from them before it sees a text. Used by `tldr`.

Attention that finds an earlier place and goes on from there (induction heads, arXiv 2209.11895) does not come about in
ten thousand short texts. It does within minutes in sequences whose every token but the first period's can be copied,
and several times as early when few different tokens occur at first; more and more of them follow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from offbeat.config.base import Settings
from services.learner.prepare.trl_settings import IGNORED, quiet

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

FIRST_TOKENS = 64
"""Different tokens in the first sequences."""
GROWTH = 0.7
"""Share of the training after which all tokens occur."""


class CopyingSettings(Settings):
    """Length and shape of the training on repeated sequences."""

    steps: int = Field(1200, gt=0, description="Optimizer updates.")
    batch: int = Field(32, gt=0, description="Sequences per update.")
    lr: float = Field(2e-3, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(50, ge=0)
    length: int = Field(48, ge=8, description="Tokens per sequence.")
    periods: tuple[int, int] = Field(
        (4, 20), description="Least and greatest number of tokens that are repeated."
    )

    @model_validator(mode="after")
    def _repeats(self) -> CopyingSettings:
        least, greatest = self.periods
        if not 2 <= least <= greatest < self.length:
            raise ValueError(
                f"periods is {least} to {greatest}: expected 2 ≤ least ≤ greatest < length ({self.length})"
            )
        return self


def repeated_sequences(
    settings: CopyingSettings, tokens: Sequence[int], seed: int
) -> Iterator[tuple[list[int], int]]:
    """(sequence, period) for each place of the training; one period per update, so that batches are of one kind.

    `tokens` are those that may occur. The first period of a sequence can't be foreseen and is not to be learned.
    """
    rng = random.Random(seed)
    order = rng.sample(list(tokens), len(tokens))
    for update in range(settings.steps):
        period = rng.randint(*settings.periods)
        grown = min(1.0, update / (GROWTH * settings.steps))
        known = order[: round(FIRST_TOKENS + grown * (len(order) - FIRST_TOKENS))]
        repeats = -(-settings.length // period)
        for _ in range(settings.batch):
            unit = rng.choices(known, k=period)
            yield (unit * repeats)[: settings.length], period


def train_copying(
    settings: CopyingSettings,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    work: Path,
) -> float:
    """Trains in place. Returns the accuracy on new sequences: the share of what repeats that is foreseen."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    special = set(tokenizer.all_special_ids)
    tokens = [token for token in range(len(tokenizer)) if token not in special]
    rows = [
        {"input_ids": ids, "labels": [IGNORED] * period + ids[period:]}
        for ids, period in repeated_sequences(settings, tokens, seed)
    ]
    SFTTrainer(
        model=model,
        args=SFTConfig(
            **quiet(work),
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch,
            learning_rate=settings.lr,
            warmup_steps=settings.warmup_steps,
            adam_beta2=0.98,
            max_length=settings.length,
            dataset_kwargs={"skip_prepare_dataset": True},
            seed=seed,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    ).train()
    return accuracy(settings, model, tokens, seed + 1)


def accuracy(
    settings: CopyingSettings, model: LlamaForCausalLM, tokens: Sequence[int], seed: int
) -> float:
    """Share of the repeated tokens that the policy foresees, in one batch with all tokens for each period."""
    import torch

    rng = random.Random(seed)
    least, greatest = settings.periods
    right = seen = 0
    model.eval()
    for period in range(least, greatest + 1):
        unit = torch.tensor([rng.choices(tokens, k=period) for _ in range(settings.batch)])
        # The first token after the first period says only then what the period is.
        ids = torch.cat([unit, unit], dim=1)
        with torch.inference_mode():
            foreseen = model(input_ids=ids).logits[:, period:-1].argmax(-1)
        right += int((foreseen == ids[:, period + 1 :]).sum())
        seen += foreseen.numel()
    return right / seen
