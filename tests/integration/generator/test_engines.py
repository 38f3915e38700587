"""The engines that have a model: what they sample, score and load is what `transformers` computes.

Both engines pass the same tests, each with tied and with untied embeddings.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import TransformersEngine, VllmEngine
from offbeat.errors import EngineError, WeightsError
from services.generator.engines import Engine, GenerationRequest, PromptTooLong, create_engine
from services.generator.merging import AdapterMerger
from tests.harness.tiny_models import (
    make_tiny_model,
    perturb,
    reference_logprobs,
    stage,
    stage_adapter,
)

# Two vLLM processes are started; on a busy machine that takes a while.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

SLOTS = 8
CONTEXT = 256
PROMPT = [1, 10, 20, 30, 40]
PARITY = [[1, 5, 9, 13, 17, 21], [1, *range(3, 120)], [7, 8]]
TOLERANCE = 1e-3
MOVED = 0.05

SETTINGS = {
    "vllm": VllmEngine(
        name="vllm",
        max_num_seqs=SLOTS,
        kv_cache_memory_mb=64,
        extra={"max_num_batched_tokens": CONTEXT},
    ),
    "transformers": TransformersEngine(name="transformers", max_num_seqs=SLOTS),
}


@dataclass
class Loaded:
    """A running engine and the model whose weights it holds."""

    engine: Engine
    model: Any
    folder: Path
    version: int = 0

    async def update(self, **options: Any) -> Any:
        """Publishes the model as the next version and loads it."""
        self.version += 1
        weights = stage(self.model, self.folder, self.version)
        try:
            return await self.engine.load_weights(weights, self.version, **options)
        finally:
            weights.discard()

    async def difference(self) -> float:
        """Largest difference of a log-prob between engine and model."""
        found = await self.engine.score_tokens(PARITY)
        return largest_difference(found, reference_logprobs(self.model, PARITY))


def largest_difference(found: list[list[float]], expected: list[list[float]]) -> float:
    assert [len(row) for row in found] == [len(row) for row in expected]
    return max(
        abs(a - b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)
    )


def request(**changes: Any) -> GenerationRequest:
    return replace(GenerationRequest("r", PROMPT, max_tokens=24, temperature=0.0), **changes)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[(name, tied) for name in SETTINGS for tied in (True, False)],
    ids=lambda p: f"{p[0]}-{'tied' if p[1] else 'untied'}",
)
async def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Loaded]:
    name, tied = request.param
    folder = tmp_path_factory.mktemp("engine")
    model = make_tiny_model(folder / "model", tied=tied)
    settings = ModelSettings(path=str(folder / "model"), dtype="float32", max_context=CONTEXT)
    engine = create_engine(SETTINGS[name], settings, threads=1)
    await engine.start()
    assert engine.version is None
    with pytest.raises(EngineError, match="no weights"):
        await engine.generate(GenerationRequest("early", PROMPT, max_tokens=1))
    result = Loaded(engine, model, folder)
    await result.update()
    yield result
    await engine.stop()


async def test_greedy_tokens_and_logprobs_equal_those_of_transformers(loaded: Loaded) -> None:
    import torch

    completion = await loaded.engine.generate(request(ignore_eos=True))
    with torch.inference_mode():
        expected = loaded.model.generate(
            torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0, len(PROMPT) :].tolist()
    assert completion.token_ids == expected
    assert completion.finish_reason == "length"
    scores = reference_logprobs(loaded.model, [[*PROMPT, *expected]])[0][len(PROMPT) - 1 :]
    assert completion.logprobs == pytest.approx(scores, abs=TOLERANCE)
    assert completion.version_spans == [(loaded.version, 24)]


async def test_logprobs_are_those_of_the_distribution_sampled_from(loaded: Loaded) -> None:
    requests = [request(temperature=0.7, seed=seed, max_tokens=20) for seed in range(12)]
    completions = await asyncio.gather(*map(loaded.engine.generate, requests))
    for completion in completions:
        tokens = [*PROMPT, *completion.token_ids]
        expected = reference_logprobs(loaded.model, [tokens], temperature=0.7)[0][len(PROMPT) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert len({tuple(completion.token_ids) for completion in completions}) > 6


async def test_five_updates_are_seen_and_a_skipped_one_would_be(loaded: Loaded) -> None:
    for update in range(5):
        before = reference_logprobs(loaded.model, PARITY)
        perturb(loaded.model, seed=100 + update)
        moved = largest_difference(before, reference_logprobs(loaded.model, PARITY))
        assert moved > MOVED
        # Not loaded yet: this is what the check says of an engine that skipped the update.
        assert await loaded.difference() > MOVED - TOLERANCE
        report = await loaded.update()
        assert loaded.engine.version == loaded.version
        assert await loaded.difference() < TOLERANCE
        assert report.pause_seconds >= report.load_seconds > 0
    # The engine now generates with the new weights as well, not only scores with them.
    completion = await loaded.engine.generate(request(ignore_eos=True))
    scores = reference_logprobs(loaded.model, [[*PROMPT, *completion.token_ids]])[0]
    assert completion.logprobs == pytest.approx(scores[len(PROMPT) - 1 :], abs=TOLERANCE)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_running_completions_go_on_over_an_update(loaded: Loaded, kv: Any) -> None:
    old = loaded.version
    task = asyncio.create_task(
        loaded.engine.generate(request(max_tokens=CONTEXT, ignore_eos=True, temperature=1.0))
    )
    await steps(loaded.engine, 5)
    perturb(loaded.model, seed=7)
    await loaded.update(kv=kv)
    completion = await task
    assert [version for version, _ in completion.version_spans] == [old, loaded.version]
    first = completion.version_spans[0][1]
    assert sum(count for _, count in completion.version_spans) == len(completion.token_ids)
    assert len(completion.token_ids) == CONTEXT - len(PROMPT)
    tokens = [*PROMPT, *completion.token_ids]
    if kv == "recompute":
        scores = reference_logprobs(loaded.model, [tokens])[0][len(PROMPT) - 1 + first :]
        assert completion.logprobs[first:] == pytest.approx(scores, abs=TOLERANCE)


async def test_drain_lets_running_completions_end_first(loaded: Loaded) -> None:
    old = loaded.version
    running = asyncio.create_task(loaded.engine.generate(request(ignore_eos=True, max_tokens=60)))
    await steps(loaded.engine, 3)
    update = asyncio.create_task(loaded.update(mode="drain"))
    await asyncio.sleep(0)
    later = asyncio.create_task(loaded.engine.generate(request(ignore_eos=True, max_tokens=4)))
    assert (await running).version_spans == [(old, 60)]
    assert (await update).drain_seconds > 0
    assert (await later).version_spans == [(loaded.version, 4)]


async def test_a_prompt_is_never_continued_from_keys_of_older_weights(loaded: Loaded) -> None:
    prompt = [1, *range(3, 120), *range(3, 120)]
    await loaded.engine.generate(request(prompt_token_ids=prompt, max_tokens=2))
    perturb(loaded.model, seed=11)
    await loaded.update()
    completion = await loaded.engine.generate(
        request(prompt_token_ids=prompt, max_tokens=8, ignore_eos=True)
    )
    scores = reference_logprobs(loaded.model, [[*prompt, *completion.token_ids]])[0]
    assert completion.logprobs == pytest.approx(scores[len(prompt) - 1 :], abs=TOLERANCE)


async def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(loaded: Loaded) -> None:
    wanted = request(temperature=1.0, seed=2**63 - 1)
    alone = await loaded.engine.generate(wanted)
    others = [request(temperature=1.0, seed=seed, max_tokens=9 + seed) for seed in range(12)]
    among, *_ = await asyncio.gather(*map(loaded.engine.generate, [wanted, *others]))
    assert among.token_ids == alone.token_ids


async def test_more_prompt_tokens_may_come_than_a_batch_holds(loaded: Loaded) -> None:
    prompts = [[1, *range(3 + i, 103 + i)] for i in range(SLOTS)]
    sampled = [
        request(request_id=f"long-{i}", prompt_token_ids=prompt, temperature=1.0, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    found = await asyncio.gather(*map(loaded.engine.generate, sampled))
    assert all(completion.token_ids for completion in found)


async def test_cancelling_frees_the_slot(loaded: Loaded) -> None:
    endless = request(max_tokens=CONTEXT, ignore_eos=True)
    tasks = [asyncio.create_task(loaded.engine.generate(endless)) for _ in range(SLOTS)]
    await steps(loaded.engine, 2)
    assert loaded.engine.running == SLOTS
    waiting = asyncio.create_task(loaded.engine.generate(request(max_tokens=1)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len((await waiting).token_ids) == 1
    assert loaded.engine.running == 0


async def test_a_stop_string_ends_the_completion_and_stays_in_it(loaded: Loaded) -> None:
    free = await loaded.engine.generate(request(ignore_eos=True))
    stop = free.text[3:5]
    end = free.text.find(stop) + len(stop)
    completion = await loaded.engine.generate(request(ignore_eos=True, stop=("ÿÿ", stop)))
    assert completion.text == free.text[:end]
    assert completion.token_ids == free.token_ids[:end]
    assert (completion.finish_reason, completion.stop_string) == ("stop", stop)
    assert len(completion.logprobs) == end


async def test_a_prompt_that_fills_the_context_is_refused(loaded: Loaded) -> None:
    with pytest.raises(PromptTooLong, match=f"{CONTEXT} tokens"):
        await loaded.engine.generate(request(prompt_token_ids=[5] * CONTEXT))
    completion = await loaded.engine.generate(
        request(prompt_token_ids=[5] * (CONTEXT - 1), ignore_eos=True)
    )
    assert len(completion.token_ids) == 1
    scores = await loaded.engine.score_tokens([[5] * CONTEXT])
    assert scores[0] == pytest.approx(
        reference_logprobs(loaded.model, [[5] * CONTEXT])[0], abs=TOLERANCE
    )


async def test_progress_grows_only_with_work(loaded: Loaded) -> None:
    before = loaded.engine.progress()
    await asyncio.sleep(0.05)
    assert loaded.engine.progress() == before
    await loaded.engine.generate(request(ignore_eos=True, max_tokens=20))
    assert loaded.engine.progress() >= before + 20


async def test_merged_adapters_are_what_peft_computes(loaded: Loaded) -> None:
    """Five versions of an adapter, none of them skipped; a running completion goes on over them."""
    import peft
    import torch

    base = loaded.folder / "base"
    loaded.model.save_pretrained(base)
    merger = AdapterMerger(str(base), "float32")
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(loaded.model), config).eval()
    running = asyncio.create_task(
        loaded.engine.generate(request(max_tokens=CONTEXT, ignore_eos=True, temperature=1.0))
    )
    await steps(loaded.engine, 2)
    versions = [loaded.version]
    for update in range(5):
        torch.manual_seed(update)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.05)
        expected = reference_logprobs(adapted, PARITY)
        assert largest_difference(await loaded.engine.score_tokens(PARITY), expected) > MOVED
        loaded.version += 1
        sent = stage_adapter(adapted, loaded.folder, loaded.version)
        whole = merger.merge(sent)
        assert not sent.path.exists()
        assert whole.path.stat().st_size > 3 * sent.manifest.total_bytes
        assert whole.path.stat().st_size <= merger.merged_bytes
        await loaded.engine.load_weights(whole, loaded.version)
        whole.discard()
        versions.append(loaded.version)
        found = await loaded.engine.score_tokens(PARITY)
        assert largest_difference(found, expected) < TOLERANCE
    spans = (await running).version_spans
    await loaded.update()
    # An update may come before the last one had a token.
    seen = [version for version, _ in spans]
    assert seen == [version for version in versions if version in seen]
    assert len(seen) > 1


async def test_weights_of_another_model_are_refused_while_the_engine_serves(loaded: Loaded) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weights = stage(loaded.model, loaded.folder, 1000, skip=name)
    with pytest.raises(
        WeightsError, match=f"version 1000 .* 1 tensors are missing, such as {name}"
    ):
        await loaded.engine.load_weights(weights, 1000)
    assert loaded.engine.version == loaded.version
    assert await loaded.difference() < TOLERANCE


async def test_a_load_that_fails_half_way_is_mended_by_a_full_one(loaded: Loaded) -> None:
    weights = stage(loaded.model, loaded.folder, 1001)
    with weights.path.open("r+b") as file:
        file.truncate(weights.manifest.total_bytes * 2 // 3)
    with pytest.raises(WeightsError, match="1001"):
        await loaded.engine.load_weights(weights, 1001)
    assert loaded.engine.version is None
    waiting = asyncio.create_task(loaded.engine.generate(request()))
    await loaded.update()
    assert await loaded.difference() < TOLERANCE
    assert [version for version, _ in (await waiting).version_spans] == [loaded.version]


async def steps(engine: Engine, count: int) -> None:
    """Waits until the engine made some steps."""
    goal = engine.progress() + count
    async with asyncio.timeout(30):
        while engine.progress() < goal:
            await asyncio.sleep(0.001)
