"""The deterministic engine: the same tokens on every attempt, and the right version on each of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import DeterministicEngine
from offbeat.errors import ModelError
from offbeat.weights.manifest import describe
from offbeat.weights.staged import StagedWeights
from services.generator.engines import Engine, GenerationRequest, create_engine

REQUEST = GenerationRequest("r", [3, 4], max_tokens=16, seed=5, ordinal=7)


@pytest.fixture(autouse=True)
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weights` writes its files here."""
    monkeypatch.chdir(tmp_path)


def weights(version: int, content: bytes) -> StagedWeights:
    manifest = describe([("w", "uint8", [len(content)], content)])
    manifest.version = version
    path = Path(f"{version}.weights")
    path.write_bytes(content)
    return StagedWeights(path, manifest)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"vocab_size": 20, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


async def started(folder: Path, **settings: float) -> Engine:
    engine = create_engine(
        DeterministicEngine(name="deterministic", **settings),
        ModelSettings(path=str(folder), dtype="float32", max_context=64),
    )
    await engine.start()
    await engine.load_weights(weights(1, b"one"), 1)
    return engine


async def test_tokens_depend_on_weights_ordinal_and_seed_only(folder: Path) -> None:
    first = await started(folder, min_tokens=8)
    second = await started(folder, min_tokens=8, max_num_seqs=1)
    expected = await first.generate(REQUEST)
    again = replace(REQUEST, request_id="attempt-2", prompt_token_ids=[9], temperature=0.2)
    assert await second.generate(again) == expected
    for other in (replace(REQUEST, seed=6), replace(REQUEST, ordinal=8)):
        assert (await first.generate(other)).token_ids != expected.token_ids
    await second.load_weights(weights(2, b"two"), 2)
    changed = await second.generate(REQUEST)
    assert changed.token_ids != expected.token_ids
    assert len(changed.token_ids) == len(expected.token_ids)


async def test_a_torn_file_shows_in_the_tokens(folder: Path) -> None:
    engine = await started(folder, min_tokens=8)
    expected = await engine.generate(REQUEST)
    torn = weights(1, b"one")
    torn.path.write_bytes(b"onf")
    await engine.load_weights(torn, 1)
    assert (await engine.generate(REQUEST)).token_ids != expected.token_ids


async def test_completions_are_well_formed(folder: Path) -> None:
    engine = await started(folder, min_tokens=3)
    requests = [replace(REQUEST, seed=seed) for seed in range(200)]
    completions = await asyncio.gather(*map(engine.generate, requests))
    for completion in completions:
        assert 3 <= len(completion.token_ids) <= 16
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(-3 < logprob < 0 for logprob in completion.logprobs)
        assert (completion.token_ids[-1] == 2) == (completion.finish_reason == "stop")
        assert all(3 <= token < 20 for token in completion.token_ids[:-1])
        assert completion.version_spans == [(1, len(completion.token_ids))]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert len({len(c.token_ids) for c in completions}) > 8


async def test_an_update_in_mid_generation_gives_two_spans(folder: Path) -> None:
    engine = await started(folder, token_seconds=0.005)
    request = replace(REQUEST, ignore_eos=True)
    alone = await engine.generate(request)
    task = asyncio.create_task(engine.generate(request))
    goal = engine.progress() + 4
    while engine.progress() < goal:
        await asyncio.sleep(0.001)
    await engine.load_weights(weights(2, b"two"), 2)
    completion = await task
    (old, count), (new, rest) = completion.version_spans
    assert (old, new, count + rest) == (1, 2, 16)
    assert completion.token_ids[:count] == alone.token_ids[:count]
    assert completion.token_ids[count:] != alone.token_ids[count:]


async def test_drain_finishes_what_runs_and_holds_what_waits(folder: Path) -> None:
    engine = await started(folder, token_seconds=0.002)
    request = replace(REQUEST, ignore_eos=True)
    running = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0)
    update = asyncio.create_task(engine.load_weights(weights(2, b"two"), 2, mode="drain"))
    await asyncio.sleep(0)
    later = asyncio.create_task(engine.generate(request))
    assert (await running).version_spans == [(1, 16)]
    assert (await update).drain_seconds > 0
    assert (await later).version_spans == [(2, 16)]


async def test_a_drain_that_is_given_up_leaves_the_engine_serving(folder: Path) -> None:
    engine = await started(folder, token_seconds=0.01)
    running = asyncio.create_task(engine.generate(replace(REQUEST, ignore_eos=True)))
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await engine.load_weights(weights(2, b"two"), 2, mode="drain")
    assert engine.version == 1
    assert (await engine.generate(replace(REQUEST, max_tokens=1))).version_spans == [(1, 1)]
    await running


async def test_slots_bound_what_runs(folder: Path) -> None:
    engine = await started(folder, token_seconds=0.001, max_num_seqs=3)
    tasks = [asyncio.create_task(engine.generate(replace(REQUEST, seed=s))) for s in range(9)]
    seen = set()
    while not all(task.done() for task in tasks):
        seen.add(engine.running)
        await asyncio.sleep(0.0005)
    assert max(seen) == 3


async def test_a_folder_that_is_no_model_is_named(tmp_path: Path, folder: Path) -> None:
    engine = create_engine(
        DeterministicEngine(name="deterministic"), ModelSettings(path=str(tmp_path / "none"))
    )
    with pytest.raises(
        ModelError, match="none: expected a Hugging Face model folder, found nothing"
    ):
        await engine.start()
    (folder / "config.json").write_text('{"vocab_size": 20}')
    with pytest.raises(ModelError, match="no eos_token"):
        await started(folder)
