"""Preference pairs that a gold reward labels, and a proxy reward model that learns from them. Used by `tldr`.

The controlled set-up of arXiv 2210.10760: gold stands in for people, the proxy for the reward model that people's
preferences were collected for, and the distance between the two can be measured.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from offbeat.config.base import Settings
from offbeat.errors import DataError
from offbeat.imports import load_callable
from services.learner.prepare.trl_settings import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLE_BATCH = 256
SCORE_BATCH = 128

Gold = Callable[..., list[float]]
"""A reward function by the convention of the reward worker."""


class ProxySettings(Settings):
    """Training of the reward model by Bradley-Terry on preference pairs."""

    posts: int = Field(1200, gt=0, description="Training posts that pairs are made of.")
    heldout_posts: int = Field(
        200, gt=0, description="Held-out posts; their pairs measure agreement."
    )
    init: str | None = Field(
        None,
        description="module:function or file.py:function that returns the folder of a transformers model, from which "
        "the reward model starts; null: the supervised policy.",
    )
    samples: int = Field(
        2, ge=1, description="Completions of the supervised policy per post, beside the reference."
    )
    temperature: float = Field(1.0, gt=0)
    steps: int = Field(150, gt=0, description="Optimizer updates; the rate decays to 0.")
    batch: int = Field(32, gt=0, description="Pairs per update.")
    lr: float = Field(5e-4, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(10, ge=0)
    seed: int = Field(0, ge=0)


@dataclass(frozen=True)
class Pair:
    """Two completions of a prompt; gold prefers `chosen` by `margin` > 0."""

    prompt: str
    chosen: str
    rejected: str
    margin: float
    with_first: bool
    """Whether one of the two was the prompt's first candidate."""


def sample_texts(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[str]:
    """One completion per prompt, from torch's own generator; those of one length are sampled together."""
    import torch

    found: dict[int, str] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), SAMPLE_BATCH):
        indices = order[start : start + SAMPLE_BATCH]
        batch = tokenizer([prompts[index] for index in indices], padding=True, return_tensors="pt")
        with torch.inference_mode():
            tokens = policy.eval().generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max_new_tokens,
                do_sample=True,
                temperature=temperature,
                top_k=0,
            )
        texts = tokenizer.batch_decode(
            tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        found |= dict(zip(indices, texts, strict=True))
    return [found[index] for index in range(len(prompts))]


def label_pairs(
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[str],
    candidates: Sequence[Sequence[str]],
    gold: Gold,
) -> list[Pair]:
    """All pairs of a row's candidates between which gold decides. `candidates[i]` belong to `rows[i]`."""
    flat = [(index, text) for index, texts in enumerate(candidates) for text in texts]
    columns = {name: [rows[index][name] for index, _ in flat] for name in rows[0]}
    columns["completions"] = [text for _, text in flat]
    columns["prompts"] = [prompts[index] for index, _ in flat]
    values = iter(_call(gold, columns))
    pairs: list[Pair] = []
    for prompt, texts in zip(prompts, candidates, strict=True):
        scored = list(zip(itertools.islice(values, len(texts)), texts, strict=True))
        for (i, one), (_, other) in itertools.combinations(enumerate(scored), 2):
            if one[0] != other[0]:
                better, worse = max(one, other), min(one, other)
                pairs.append(Pair(prompt, better[1], worse[1], better[0] - worse[0], i == 0))
    return pairs


def _call(function: Gold, arguments: dict[str, list[Any]]) -> list[float]:
    """Calls a reward function with those of the arguments that its signature names, as the reward worker does."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    return function(**arguments)


def train_proxy(
    settings: ProxySettings, pairs: Sequence[Pair], policy: Path, work: Path, out: Path
) -> None:
    """Trains a reward model by TRL, from `settings.init` or the folder of the policy, and writes its folder `out`."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
    from trl import RewardConfig, RewardTrainer

    set_seed(settings.seed)
    if not pairs:
        raise DataError("expected preference pairs, found none: gold values all completions alike")
    start = policy
    if settings.init is not None:
        start = load_callable(settings.init, key="prepare.params.proxy.init")()
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1, dtype="float32")
    model.config.pad_token_id = tokenizer.pad_token_id
    rng = random.Random(settings.seed)
    wanted = settings.steps * settings.batch
    shown: list[Pair] = []
    while len(shown) < wanted:
        shown += rng.sample(pairs, min(len(pairs), wanted - len(shown)))
    rows = {
        "chosen_ids": encode(tokenizer, [pair.prompt + pair.chosen for pair in shown]),
        "rejected_ids": encode(tokenizer, [pair.prompt + pair.rejected for pair in shown]),
    }
    trainer: RewardTrainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            **quiet(work),
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch,
            learning_rate=settings.lr,
            warmup_steps=settings.warmup_steps,
            max_length=None,
            seed=settings.seed,
        ),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def agreement(folder: Path, pairs: Sequence[Pair]) -> float:
    """Share of the pairs in which the reward model of a folder prefers what gold prefers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32").eval()
    chosen = _scores(model, tokenizer, [pair.prompt + pair.chosen for pair in pairs])
    rejected = _scores(model, tokenizer, [pair.prompt + pair.rejected for pair in pairs])
    return sum(c > r for c, r in zip(chosen, rejected, strict=True)) / len(pairs)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of whole texts, as `reward_model` makes them; with `append_eos` where there is such a token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [[*ids, *end] for ids in tokenizer(list(texts))["input_ids"]]


def _scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[float]:
    import torch

    found: list[float] = []
    encoded = encode(tokenizer, texts)
    for start in range(0, len(encoded), SCORE_BATCH):
        batch = tokenizer.pad(
            {"input_ids": encoded[start : start + SCORE_BATCH]}, return_tensors="pt"
        )
        with torch.inference_mode():
            found += model(**batch).logits.squeeze(-1).tolist()
    return found
