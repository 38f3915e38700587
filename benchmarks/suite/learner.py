"""(b) The learner beside a bare DeepSpeed loop: the same groups, cut into the same micro-batches, the same loss.

The loop is what somebody would write by hand who knows what will come: the padded tensors lie ready, only the logits of
completion tokens are computed, online DPO's loss is three lines, and nothing is logged. Both stand in one process and
take turns, a step each. `Trainer.train_step` is everything that a step costs the learner but for the streams.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.suite.cells import AT_MOST, CellSpec, Row
from benchmarks.suite.fixtures import merged, recipe_tree, smollm2, tiny_model
from benchmarks.suite.measure import alternate, ratios
from benchmarks.suite.options import Options

BETA = 0.1
WARM_UP = 2


def cells(options: Options) -> list[CellSpec]:
    """Both models."""

    def tiny() -> list[Row]:
        return measure(tiny_model(options.scratch), options, prompts=32, tokens=24, rounds=12)

    def real() -> list[Row]:
        return measure(smollm2(options), options, prompts=4, tokens=48, rounds=4)

    return [CellSpec("b", "2M", tiny), CellSpec("b", "SmolLM2-135M", real)]


def measure(
    model: Path, options: Options, *, prompts: int, tokens: int, rounds: int, dtype: str = "float32"
) -> list[Row]:
    """Seconds of a step, and their ratio."""
    from offbeat.config import Recipe
    from services.learner.batching import StepBatch
    from services.learner.trainer import Trainer

    tree = recipe_tree(model, options, prompts=1)
    changes = {"model.dtype": dtype, "model.max_context": 256, "run.id": "learner"}
    changes |= {"learner.threads": max(1, len(options.cores) // 2)}
    recipe = Recipe.model_validate(merged(tree, changes))
    trainer = Trainer(recipe)
    groups = made_groups(prompts, tokens, vocabulary=256)
    loop = BareLoop(recipe, StepBatch(groups, trainer._loss.units), trainer._passes)

    cpu: dict[str, list[float]] = {"offbeat": [], "bare": []}

    def timed(name: str, step: Callable[[], Any]) -> Callable[[], float]:
        def measured() -> float:
            started, used = time.perf_counter(), time.process_time()
            step()
            cpu[name].append(time.process_time() - used)
            return time.perf_counter() - started

        return measured

    contenders = {
        "offbeat": timed("offbeat", lambda: trainer.train_step(groups)),
        "bare": timed("bare", loop.step),
    }
    found = alternate(options.rounds(rounds), contenders, warm_up=WARM_UP)
    used = [cpu[name][WARM_UP:] for name in contenders]
    difference = loop.difference(trainer, groups)
    return [
        Row("learner ÷ bare loop", ratios(found["offbeat"], found["bare"]), "x", (AT_MOST, 1.05)),
        Row("learner, a step", found["offbeat"], "s"),
        Row("bare loop, a step", found["bare"], "s"),
        Row("CPU seconds, learner ÷ bare loop", ratios(*used), "x"),
        Row("largest difference of a log-prob after the steps", [difference], "nat"),
    ]


def made_groups(prompts: int, tokens: int, *, vocabulary: int) -> list[Any]:
    """Pairs of completions of different lengths, the longer one `tokens` long."""
    from services.learner.batching import Group, Sample

    rng = np.random.default_rng(0)

    def sample(reward: float) -> Sample:
        length = int(rng.integers(tokens // 2, tokens + 1))
        return Sample(
            token_ids=rng.integers(3, vocabulary, length).astype(np.int32),
            behaviour_logprobs=np.full(length, -1.0, np.float32),
            reward=reward,
            has_eos=True,
        )

    return [
        Group(ordinal, rng.integers(3, vocabulary, 16).astype(np.int32), (sample(0.0), sample(1.0)))
        for ordinal in range(prompts)
    ]


class BareLoop:
    """DeepSpeed, a transformers model, AdamW, and a loop."""

    def __init__(self, recipe: Any, batch: Any, passes: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from services.learner.batching import rows_in
        from services.learner.engine import _config, import_deepspeed

        deepspeed = import_deepspeed()
        settings, dtype = recipe.learner, recipe.model.dtype
        self._device = passes.device

        def load() -> Any:
            found = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=dtype)
            return found.to(passes.device)

        self._reference = load().eval().requires_grad_(False)
        policy = load()
        optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.optimizer.lr, weight_decay=0.0
        )
        # The learner's own configuration, so that both do the same arithmetic.
        self._engine, *_ = deepspeed.initialize(
            model=policy,
            optimizer=optimizer,
            config=_config(settings, dtype),
            dist_init_required=False,
        )
        self._norm = settings.optimizer.max_grad_norm
        self._scale = 1.0 / len(batch.groups)
        units = [unit for of_group in batch.units for unit in of_group]
        self._tensors = [
            self._ready(batch, rows_in(micro_batch)) for micro_batch in passes.share(batch, units)
        ]

    def _ready(self, batch: Any, rows: list[int]) -> tuple[Any, Any, Any]:
        """Tokens, mask of the completion tokens, and the first position whose logits are needed."""
        import torch

        tokens, prompts, completions, first = batch.collate(rows)
        places = torch.arange(first, tokens.shape[1])
        inside = places >= prompts[:, None]
        inside &= places < (prompts + completions)[:, None]
        return tokens.to(self._device), inside.to(self._device), first

    def _sums(self, model: Any, tokens: Any, inside: Any, first: int) -> Any:
        """log pi of each completion."""
        import torch

        keep = torch.arange(first - 1, tokens.shape[1] - 1, device=tokens.device)
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits.float()
        targets = tokens[:, first:, None]
        logprobs = logits.gather(-1, targets)[..., 0] - torch.logsumexp(logits, dim=-1)
        return torch.where(inside, logprobs, 0.0).sum(-1)

    def step(self) -> None:
        """One update on all micro-batches."""
        import torch
        from torch.nn import functional

        with torch.no_grad():
            references = [self._sums(self._reference, *tensors) for tensors in self._tensors]
        for number, (tensors, reference) in enumerate(zip(self._tensors, references, strict=True)):
            margins = (self._sums(self._engine, *tensors) - reference).view(-1, 2)
            loss = -functional.logsigmoid(BETA * (margins[:, 0] - margins[:, 1])).sum()
            last = number == len(self._tensors) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            self._engine.backward(loss * self._scale)
        if self._engine.optimizer is self._engine.basic_optimizer:
            torch.nn.utils.clip_grad_norm_(self._engine.module.parameters(), self._norm)
        self._engine.step()

    def difference(self, trainer: Any, groups: list[Any]) -> float:
        """Whether both did the same work: after as many steps, how far the two policies are apart."""
        import torch

        sequence = [int(token) for token in groups[0].prompt_token_ids]
        sequence += [int(token) for token in groups[0].completions[0].token_ids]
        tokens = torch.tensor([sequence], device=self._device)
        with torch.no_grad():
            logprobs = torch.log_softmax(self._engine.module(tokens).logits[0, :-1].float(), -1)
        ours = logprobs.gather(-1, tokens[0, 1:, None])[:, 0].tolist()
        theirs = trainer.parity_logprobs([sequence])[0]
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
