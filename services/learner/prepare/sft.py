"""A small policy from nothing: a character tokenizer, a Llama of a few layers, supervised training by TRL.

Used by `offbeat prepare` through `services.learner.prepare`. The folder that it writes loads in
`transformers`, vLLM and TRL, and has a `prepare.json` that says how it came about.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from offbeat.config.base import Settings
from offbeat.errors import DataError, ModelError
from offbeat.imports import load_callable
from services.learner.prepare.trl_settings import IGNORED, quiet

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

log = logging.getLogger(__name__)

VERSIONS_OF = ("torch", "transformers", "trl", "tokenizers", "reasoning-gym")


class SftSettings(Settings):
    """Sizes of the policy and its supervised training."""

    init: str | None = Field(
        None,
        description="Model folder to go on from, an absolute path; null: random weights, new tokenizer.",
    )
    seed: int = Field(0, ge=0, description="Seed of the weights, the order and the demonstrations.")
    steps: int = Field(600, gt=0, description="Optimizer updates; the learning rate decays to 0.")
    batch: int = Field(128, gt=0, description="Demonstrations per update.")
    lr: float = Field(2e-3, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(50, ge=0, description="Updates from 0 to the peak.")
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.01, ge=0)
    demonstrator: str | None = Field(
        None,
        description="module:function or file.py:function, called with (row, random.Random, share of the training that "
        "is done); returns the demonstrated answer. Null: the row's answer.",
    )
    prompt_loss_part: float = Field(
        0.0,
        ge=0,
        le=1,
        description="First share of the training in which the prompts' tokens are learned too.",
    )
    hidden_size: int = Field(128, gt=0)
    layers: int = Field(2, gt=0)
    heads: int = Field(4, gt=0)
    intermediate_size: int = Field(512, gt=0)
    max_context: int = Field(64, gt=0, description="Positions of the policy.")
    rope_theta: float = Field(100.0, gt=0, description="Small, as contexts are short.")
    init_std: float = Field(0.06, gt=0, description="Standard deviation of the first weights.")
    tied_embeddings: bool = False
    bf16: bool = Field(True, description="Store the weights in bf16: half the bytes.")
    evaluate_every: int = Field(50, gt=0, description="Updates between evaluations.")
    evaluation_prompts: int = Field(1000, gt=0, description="Held-out prompts of an evaluation.")
    max_new_tokens: int = Field(6, gt=0, description="Longest answer in an evaluation.")

    @model_validator(mode="after")
    def _head_size(self) -> SftSettings:
        size, rest = divmod(self.hidden_size, self.heads)
        # vLLM's attention on CPUs takes no other sizes.
        if rest or size % 32:
            raise ValueError(
                f"hidden_size / heads is {self.hidden_size} / {self.heads}: it must be a multiple of 32"
            )
        return self


@dataclass(frozen=True)
class Example:
    """A prompt and its right answer; `row` holds the columns, for the demonstrator."""

    prompt: str
    answer: str
    row: dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Held-out pass@1 after a number of updates."""

    step: int
    greedy: float
    sampled: float


def prepare_sft(
    settings: SftSettings, *, train: Sequence[Example], heldout: Sequence[Example], out: Path
) -> list[Evaluation]:
    """Trains a policy and writes its folder `out`, whole or not at all.

    `train` and `heldout` must not share prompts. Returns the evaluations; the last one is of the
    weights as they are stored. Raises `ModelError` when `out` exists, `DataError` for unusable rows.
    """
    if out.exists():
        raise ModelError(
            f"{out}: expected no such folder, found one; remove it to prepare it again"
        )
    _check(train, heldout)
    started = time.monotonic()
    from transformers import set_seed

    from services.learner.model import load_policy, load_tokenizer
    from services.learner.prepare.tokenizer import alphabet_of, character_tokenizer

    set_seed(settings.seed)
    if settings.init is not None:
        tokenizer, model = load_tokenizer(settings.init), load_policy(settings.init)
    else:
        texts = (text for e in (*train, *heldout) for text in (e.prompt, e.answer))
        tokenizer = character_tokenizer(alphabet_of(texts), max_length=settings.max_context)
        model = new_policy(settings, tokenizer)
    heldout = heldout[: settings.evaluation_prompts]

    def evaluate(step: int) -> Evaluation:
        found = Evaluation(
            step,
            pass_at_1(model, tokenizer, heldout, settings, greedy=True),
            pass_at_1(model, tokenizer, heldout, settings, greedy=False),
        )
        log.info("step %d: greedy %.3f, sampled %.3f", step, found.greedy, found.sampled)
        return found

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        evaluations: list[Evaluation] = []
        train_policy(
            settings,
            model,
            tokenizer,
            train,
            lambda step: evaluations.append(evaluate(step)),
            Path(work) / "trainer",
        )
        folder = Path(work) / "policy"
        save_policy(settings, model, tokenizer, folder)
        evaluations.append(evaluate(settings.steps))
        _describe(settings, model, evaluations, time.monotonic() - started, folder)
        folder.rename(out)
    return evaluations


def new_policy(settings: SftSettings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights in fp32, for the tokenizer's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            head_dim=settings.hidden_size // settings.heads,
            max_position_embeddings=settings.max_context,
            rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
            initializer_range=settings.init_std,
            tie_word_embeddings=settings.tied_embeddings,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def demonstrations(settings: SftSettings, train: Sequence[Example]) -> list[tuple[str, str]]:
    """One prompt and answer per place in the training: passes over the rows, each in its own order."""
    show: Callable[[dict[str, Any], random.Random, float], str] = (
        (lambda row, _, __: str(row["answer"]))
        if settings.demonstrator is None
        else load_callable(settings.demonstrator, key="prepare.params.demonstrator")
    )
    rng = random.Random(settings.seed)
    shown: list[tuple[str, str]] = []
    wanted = settings.steps * settings.batch
    while len(shown) < wanted:
        for example in rng.sample(train, min(len(train), wanted - len(shown))):
            answer = show(example.row, rng, len(shown) / wanted)
            shown.append((example.prompt, answer))
    return shown


def pass_at_1(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    settings: SftSettings,
    *,
    greedy: bool,
) -> float:
    """Share of the examples answered exactly, end of sequence included, greedily or at temperature 1."""
    import torch

    was_training = model.training
    model.eval()
    batch = tokenizer([e.prompt for e in examples], padding=True, return_tensors="pt").to(
        model.device
    )
    kinds: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    # The evaluation leaves the training's random numbers as they were.
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(settings.seed)
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=settings.max_new_tokens,
            **kinds,
        )
    model.train(was_training)
    ended = tokenizer.eos_token
    answers = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :])
    right = sum(
        text.split(tokenizer.pad_token)[0] == e.answer + ended
        for text, e in zip(answers, examples, strict=True)
    )
    return right / len(examples)


def _check(train: Sequence[Example], heldout: Sequence[Example]) -> None:
    if not train or not heldout:
        raise DataError(
            f"expected rows to train on and held-out rows, found {len(train)} and {len(heldout)}"
        )
    shared = {e.prompt for e in train} & {e.prompt for e in heldout}
    if shared:
        raise DataError(
            f"expected held-out prompts that training never sees, found {len(shared)} in both, "
            f"such as {min(shared)!r}; leave them out of the training rows"
        )


def train_policy(
    settings: SftSettings,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train: Sequence[Example],
    evaluate: Callable[[int], None],
    work: Path,
) -> None:
    """Trains in place; calls `evaluate` with the step every now and then, but not after the last update."""
    from transformers import TrainerCallback
    from trl import SFTTrainer

    class Evaluate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if (
                state.global_step % settings.evaluate_every == 0
                and state.global_step < state.max_steps
            ):
                evaluate(state.global_step)

    trainer: SFTTrainer = SFTTrainer(
        model=model,
        args=_trainer_settings(settings, work),
        train_dataset=_dataset(settings, demonstrations(settings, train), tokenizer),
        processing_class=tokenizer,
        callbacks=[Evaluate()],
    )
    trainer.train()


def _dataset(
    settings: SftSettings, shown: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> Dataset:
    """Token ids and labels. Two batched calls are far quicker than TRL's passes over the rows."""
    from datasets import Dataset

    prompts = tokenizer([prompt for prompt, _ in shown], add_special_tokens=False)["input_ids"]
    answers = tokenizer([answer for _, answer in shown], add_special_tokens=False)["input_ids"]
    ended = [[*answer, tokenizer.eos_token_id] for answer in answers]
    pairs = list(zip(prompts, ended, strict=True))
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    if longest > tokenizer.model_max_length:
        raise DataError(
            f"expected demonstrations of at most {tokenizer.model_max_length} tokens (max_context), "
            f"found one of {longest}; raise prepare.params.max_context, or choose shorter tasks"
        )
    whole = round(settings.prompt_loss_part * len(pairs))
    labels = [prompt + answer for prompt, answer in pairs[:whole]]
    labels += [[IGNORED] * len(prompt) + answer for prompt, answer in pairs[whole:]]
    return Dataset.from_dict(
        {"input_ids": [prompt + answer for prompt, answer in pairs], "labels": labels}
    )


def _trainer_settings(settings: SftSettings, work: Path) -> SFTConfig:
    from trl import SFTConfig

    return SFTConfig(
        **quiet(work),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        learning_rate=settings.lr,
        warmup_steps=settings.warmup_steps,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        weight_decay=settings.weight_decay,
        max_length=settings.max_context,
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=settings.seed,
    )


def save_policy(
    settings: SftSettings,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> None:
    """Stores the policy; the model in memory gets the values as stored."""
    import torch

    model.config.use_cache = True  # the trainer turns it off
    if settings.bf16:
        model.to(torch.bfloat16)
    model.save_pretrained(folder)
    model.to(torch.float32)
    tokenizer.save_pretrained(folder)


def _describe(
    settings: SftSettings,
    model: LlamaForCausalLM,
    evaluations: Sequence[Evaluation],
    seconds: float,
    folder: Path,
) -> None:
    described = {
        "settings": settings.model_dump(mode="json"),
        "parameters": model.num_parameters(),
        "seconds": round(seconds, 1),
        "evaluations": [asdict(found) for found in evaluations],
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS_OF},
    }
    text = json.dumps(described, indent=2) + "\n"
    (folder / "prepare.json").write_text(text, encoding="utf-8")
