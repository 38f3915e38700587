"""A run with a real Redis, real reward workers as processes, and a test in the place of generator and learner."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.config.service import RedisSettings
from offbeat.local.redis_server import RedisServer
from offbeat.streams.base import Delivery, Member, Stream
from offbeat.streams.redis import RedisLearnerStreams, RedisWorkerStreams
from offbeat.v1 import samples_pb2
from tests.harness.service import Service

K = 2
REDIS = {"min_idle_seconds": 1.0, "beat_seconds": 0.2}

FUNCTIONS = '''
"""Reward functions that do what each test needs."""
import asyncio, os, pathlib, time

FOLDER = pathlib.Path(os.environ["TEST_FOLDER"])

def _note(prompts):
    with (FOLDER / f"calls.{os.getpid()}").open("a") as file:
        file.write("".join(f"{prompt}\\n" for prompt in prompts[::2]))

def fine(prompts, completions):
    return [float(len(completion)) for completion in completions]

def slow(prompts, completions):
    """Takes its time for each group, so that several workers have something to do."""
    _note(prompts)
    time.sleep(0.02 * len(prompts))
    return fine(prompts, completions)

async def gate(prompts, completions):
    """Waits until the test opens the gate."""
    _note(prompts)
    while not (FOLDER / "open").exists():
        await asyncio.sleep(0.01)
    return fine(prompts, completions)

def raises(prompts, completions):
    if any(prompt == "bad" or prompt.startswith("bad-raises") for prompt in prompts):
        raise ValueError("can't score this")
    return fine(prompts, completions)

def not_a_number(prompts, completions):
    return [float("nan") if "bad-not" in p else float(len(c)) for p, c in zip(prompts, completions)]

def wrong_length(prompts, completions):
    return fine(prompts, completions)[: -1 if "bad-wrong_length" in prompts else None]

def stuck(prompts, completions):
    if "bad" in "".join(prompts):
        time.sleep(600)
    return fine(prompts, completions)

def dies(prompts, completions):
    if "bad" in "".join(prompts):
        os._exit(9)
    return fine(prompts, completions)
'''


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(tmp_path_factory.mktemp("redis"), max_memory_bytes=128 * 1024**2) as server:
        yield server.url


class Run:
    """One run: its folder, its streams, and the workers that a test starts."""

    def __init__(self, folder: Path, redis_url: str, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.functions = folder / "functions.py"
        self.functions.write_text(FUNCTIONS)
        self._url = redis_url
        self._stack = stack
        self._id = f"run-{os.getpid()}-{abs(hash(folder))}"
        settings = RedisSettings(**REDIS)
        self.learner = RedisLearnerStreams(redis_url, self._id, "test", settings)
        self.generator = RedisWorkerStreams(redis_url, self._id, "generator", "test", settings)

    async def close(self) -> None:
        await self.learner.close()
        await self.generator.close()

    def worker(
        self, *functions: dict[str, Any] | str, log_level: str = "INFO", **reward: Any
    ) -> Service:
        """Starts a worker; a text names one of the functions above."""
        listed = [
            {"name": f, "path": f"{self.functions}:{f}"} if isinstance(f, str) else f
            for f in functions
        ]
        recipe = {
            "run": {"id": self._id, "directory": str(self.folder)},
            "model": {"path": "policy"},
            "data": {"train": {"kind": "jsonl", "path": "data.jsonl"}},
            "sampling": {"k": K, "max_tokens": 8},
            "schedule": {"steps": 1, "prompts_per_step": 1},
            "learner": {"loss": {"name": "online_dpo"}},
            "reward": {"functions": listed, **reward},
            "redis": {"url": self._url, **REDIS},
            "telemetry": {"log_level": log_level},
        }
        file = self.folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        service = _Worker(
            "reward", file, self.folder / self._id, environment={"TEST_FOLDER": str(self.folder)}
        )
        self._stack.enter_context(service)
        service.start()
        return service

    async def issue(self, prompts: Sequence[str], *, start: int = 0, broken: bool = False) -> None:
        """Puts a rollout for each prompt on the stream, in the way that learner and generator do it."""
        tasks = [_task(self._id, start + i, prompt) for i, prompt in enumerate(prompts)]
        await self.learner.issue(tasks)
        left = len(tasks)
        while left:
            for delivery in await self.generator.take(64):
                rollout = _rollout(delivery.record)
                if broken:
                    rollout.task.columns["answer"].json = "{"
                assert await self.generator.hand_off(delivery, rollout)
                left -= 1

    async def collect(self, count: int) -> list[Delivery[Any]]:
        """The next results, `count` of them."""
        found: list[Delivery[Any]] = []
        while len(found) < count:
            found += await self.learner.collect()
        assert len(found) == count
        return found

    async def pending(self) -> dict[Stream, int]:
        """Entries of each stream that somebody holds or could take."""
        return {entry.stream: entry.entries for entry in await self.learner.backlog()}

    async def reward_members(self) -> list[Member]:
        """Reward workers that live."""
        return [member for member in await self.learner.members() if member.role == "reward"]

    def calls(self) -> list[list[str]]:
        """Prompts that each process was asked to score."""
        return [path.read_text().split() for path in sorted(self.folder.glob("calls.*"))]

    def open_gate(self) -> None:
        """Lets the function `gate` go on."""
        (self.folder / "open").touch()


class _Worker(Service):
    """A reward worker is known by its host and process, which only the start decides."""

    def start(self) -> None:
        super().start()
        self._address = self._address.with_name(f"reward.{socket.gethostname()}-{self.process.pid}")

    async def listening(self) -> str:
        """Waits for the address alone."""
        while not self._address.exists():
            assert self.process.poll() is None, self.log.read_text()
            await asyncio.sleep(0.01)
        return self._address.read_text()


@pytest.fixture
async def run(tmp_path: Path, redis_url: str) -> AsyncIterator[Run]:
    with contextlib.ExitStack() as stack:
        made = Run(tmp_path, redis_url, stack)
        await made.learner.prepare(needed_bytes=0)
        await made.learner.begin_term(1)
        yield made
        await made.close()


def _task(run_id: str, ordinal: int, prompt: str) -> samples_pb2.PromptTask:
    task = samples_pb2.PromptTask(
        run_id=run_id,
        ordinal=ordinal,
        term=1,
        kind=samples_pb2.TASK_KIND_TRAIN,
        prompt_token_ids=[1, 2],
        prompt_text=prompt,
        k=K,
        seeds=range(K),
        sampling=samples_pb2.SamplingParams(max_tokens=8),
    )
    task.columns["answer"].text = "a"
    return task


def _rollout(task: samples_pb2.PromptTask) -> samples_pb2.Rollout:
    completions = [
        samples_pb2.Completion(
            token_ids=[3] * (index + 1),
            logprobs=[-0.5] * (index + 1),
            version_spans=[samples_pb2.VersionSpan(version=1, count=index + 1)],
            finish_reason=samples_pb2.FINISH_REASON_STOP,
            text="a" * (index + 1),
        )
        for index in range(task.k)
    ]
    return samples_pb2.Rollout(task=task, completions=completions, generator_id="test")
