"""(a) The generator service beside bare vLLM: `AsyncLLM` with the same flags, on the same prompts, with the same seeds.

The service is a process of its own with all that it does in a run: it takes tasks from Redis, watches the checkpoint
service, beats, makes text of tokens, and hands the groups on. Bare vLLM gets all prompts at once and makes no text.
Both stay up and take turns, a batch each.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.suite.cells import AT_LEAST, CellSpec, Row
from benchmarks.suite.fixtures import (
    free_address,
    merged,
    recipe_tree,
    redis_server,
    smollm2,
    tiny_model,
    train_tasks,
)
from benchmarks.suite.measure import CpuMeter, ratios
from benchmarks.suite.options import Options
from offbeat.config import Recipe
from offbeat.streams.base import Stream

RUN = "generator-bench"
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Work:
    """One batch: groups of k completions of exactly `tokens` tokens, unless one ends earlier."""

    groups: int
    k: int
    tokens: int
    slots: int
    rounds: int


def cells(options: Options) -> list[CellSpec]:
    """Both models."""

    def tiny() -> list[Row]:
        return measure(tiny_model(options.scratch), Work(128, 4, 24, 128, 7), options, "float32")

    def real() -> list[Row]:
        work = Work(24, 4, 32, 32, 5)
        return measure(smollm2(options), work, options, "bfloat16")

    return [CellSpec("a", "2M", tiny), CellSpec("a", "SmolLM2-135M", real)]


def measure(model: Path, work: Work, options: Options, dtype: str) -> list[Row]:
    """Tokens per second of both, and their ratio."""
    return asyncio.run(_measure(model, work, options, dtype))


async def _measure(model: Path, work: Work, options: Options, dtype: str) -> list[Row]:
    folder = options.scratch / "generator"
    folder.mkdir(parents=True, exist_ok=True)
    recipe_file = folder / "recipe.yaml"
    with redis_server() as redis:
        tree = _recipe(model, work, options, dtype, redis.url)
        recipe_file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        recipe = Recipe.model_validate(tree)
        with BareEngine(recipe_file) as bare, _services(recipe_file, folder) as pid:
            async with _service(recipe, work) as service:
                rates: dict[str, list[float]] = {"service": [], "bare": []}
                cpu: dict[str, list[float]] = {"service": [], "bare": []}
                meters = {"service": CpuMeter(pid), "bare": CpuMeter(bare.pid)}
                for number in range(options.rounds(work.rounds) + 1):
                    prompts = _prompts(work, number, _vocabulary(model))
                    order = ("service", "bare") if number % 2 else ("bare", "service")
                    for name in order:
                        before = meters[name].read()
                        if name == "bare":
                            rate = bare.tokens_per_second(prompts, work, number)
                        else:
                            rate = await service.tokens_per_second(prompts, work, number)
                        if number:
                            rates[name].append(rate)
                            cpu[name].append(meters[name].read() - before)
    pairs = list(zip(rates["service"], rates["bare"], strict=True))
    return [
        Row("generator ÷ bare AsyncLLM", [s / b for s, b in pairs], "x", (AT_LEAST, 0.97)),
        Row(
            "generator", rates["service"], "tokens/s", note=f"{work.groups} × {work.k} completions"
        ),
        Row("bare AsyncLLM", rates["bare"], "tokens/s"),
        Row("CPU seconds, bare ÷ generator", ratios(cpu["bare"], cpu["service"]), "x"),
    ]


def _recipe(
    model: Path, work: Work, options: Options, dtype: str, redis_url: str
) -> dict[str, Any]:
    return merged(
        recipe_tree(model, options, prompts=1),
        {
            "run.id": RUN,
            "run.directory": str(options.scratch / "generator"),
            "model.dtype": dtype,
            "sampling": {"k": work.k, "max_tokens": work.tokens},
            "generator.engine.max_num_seqs": work.slots,
            "generator.threads": max(1, len(options.cores) // 2),
            "redis.url": redis_url,
            "checkpoint": {"address": (address := free_address()), "rpc": {"bind": address}},
        },
    )


def _vocabulary(model: Path) -> int:
    size: int = json.loads((model / "config.json").read_text("utf-8"))["vocab_size"]
    return size


def _prompts(work: Work, number: int, vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(number)
    return [rng.integers(3, vocabulary, 16).tolist() for _ in range(work.groups)]


@contextlib.contextmanager
def _services(recipe_file: Path, folder: Path) -> Iterator[int]:
    """The checkpoint service and a generator, whose process id it gives."""
    (folder / RUN).mkdir(exist_ok=True)
    with (folder / "services.log").open("wb") as log:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", f"services.{name}", "--recipe", str(recipe_file)],
                stdout=log,
                stderr=log,
            )
            for name in ("checkpoint", "generator")
        ]
        try:
            yield children[-1].pid
        finally:
            for child in reversed(children):
                child.terminate()
                child.wait()


class Service:
    """The generator, as the learner sees it."""

    def __init__(self, streams: Any, redis: Any, version: int) -> None:
        self._streams = streams
        self._redis = redis
        self._version = version
        self._next = 0

    async def tokens_per_second(self, prompts: list[list[int]], work: Work, number: int) -> float:
        """Issues the prompts and waits until all groups are on the next stream."""
        from offbeat.streams.keys import Keys
        from offbeat.v1 import samples_pb2 as samples

        rollouts = Keys(RUN).stream(Stream.ROLLOUTS)
        tasks = train_tasks(
            RUN, self._next, prompts, k=work.k, max_tokens=work.tokens, min_version=self._version
        )
        self._next += len(prompts)
        started = time.perf_counter()
        await self._streams.issue(tasks)
        while await self._redis.xlen(rollouts) < len(prompts):
            await asyncio.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - started
        tokens = 0
        for _, fields in await self._redis.xrange(rollouts):
            rollout = samples.Rollout.FromString(fields[b"p"])
            tokens += sum(len(completion.token_ids) for completion in rollout.completions)
        await self._redis.xtrim(rollouts, maxlen=0)
        return tokens / seconds


@contextlib.asynccontextmanager
async def _service(recipe: Recipe, work: Work) -> AsyncIterator[Service]:
    """Publishes the model folder's weights as the first version, and waits until the generator holds it."""
    from offbeat.streams.link import connect
    from offbeat.streams.redis import RedisLearnerStreams
    from offbeat.v1 import checkpoint_pb2 as checkpoint
    from offbeat.weights.client import CheckpointClient
    from offbeat.weights.manifest import describe

    assert recipe.redis.url is not None
    assert recipe.checkpoint.address is not None
    client = CheckpointClient(recipe.checkpoint.address, RUN, "bench")
    await client.status(deadline_seconds=60)
    reply = await client.acquire_learner("bench", term_floor=0, version_floor=0)
    streams = RedisLearnerStreams(recipe.redis.url, RUN, "bench", recipe.redis)
    await streams.prepare(needed_bytes=0)
    await streams.begin_term(reply.term)
    weights = _weights(Path(recipe.model.path), recipe.model.dtype)
    manifest = describe(weights)
    manifest.run_id, manifest.term, manifest.publish_id = RUN, reply.term, "0"
    manifest.kind = checkpoint.WEIGHTS_KIND_FULL
    buffers = [buffer for *_, buffer in weights]
    published = await client.publish(manifest, buffers, base=None, deadline_seconds=120)
    redis = connect(recipe.redis.url)
    try:
        yield Service(streams, redis, published.manifest.version)
    finally:
        await redis.aclose()
        await streams.close()
        await client.close()


def _weights(model: Path, dtype: str) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
    import torch
    from safetensors.torch import load_file

    found = []
    for name, tensor in load_file(model / "model.safetensors").items():
        whole = tensor.to(getattr(torch, dtype)).contiguous()
        raw = memoryview(whole.reshape(-1).view(torch.uint8).numpy())
        found.append((name, dtype, tuple(whole.shape), raw))
    return found


class BareEngine:
    """vLLM in a process of its own, told what to do by lines of JSON."""

    def __init__(self, recipe_file: Path) -> None:
        self._recipe_file = recipe_file

    def __enter__(self) -> "BareEngine":
        self._log = self._recipe_file.with_name("bare.log").open("wb")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.suite.bare_engine", str(self._recipe_file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._answer()
        self.pid = self._child.pid
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stdin.close()  # type: ignore[union-attr]
        self._child.wait()
        self._log.close()

    def _answer(self) -> dict[str, float]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("{"):
                found: dict[str, float] = json.loads(line)
                return found
        raise RuntimeError(f"bare vLLM ended; see {self._recipe_file.with_name('bare.log')}")

    def tokens_per_second(self, prompts: list[list[int]], work: Work, number: int) -> float:
        """Generates the batch."""
        assert self._child.stdin is not None
        told = {
            "prompts": prompts,
            "k": work.k,
            "tokens": work.tokens,
            "first": number * work.groups,
        }
        self._child.stdin.write(json.dumps(told) + "\n")
        self._child.stdin.flush()
        found = self._answer()
        return found["tokens"] / found["seconds"]
