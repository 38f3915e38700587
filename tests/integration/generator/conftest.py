"""A run with a real Redis and checkpoint service, real generators as processes, and a test in the learner's place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat import rpc
from offbeat.config.service import RedisSettings, RpcSettings
from offbeat.local.redis_server import RedisServer
from offbeat.streams.base import Delivery, Stream
from offbeat.streams.redis import RedisLearnerStreams, RedisWorkerStreams
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import samples_pb2 as samples
from offbeat.weights.client import CheckpointClient
from offbeat.weights.manifest import Buffer, describe
from services.checkpoint.service import SERVICE_NAME, CheckpointServicer, add_to_server
from services.checkpoint.store import VersionStore
from tests.harness.service import Service

K = 2
MAX_TOKENS = 12
CONTEXT = 64
REDIS = {"min_idle_seconds": 1.5, "beat_seconds": 0.2}
DETERMINISTIC = {"name": "deterministic", "max_num_seqs": 16}

ParitySequence = tuple[Sequence[int], Sequence[float]]


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(tmp_path_factory.mktemp("redis"), max_memory_bytes=128 * 1024**2) as server:
        yield server.url


class Generator(Service):
    """A generator is known by its host and process, which only the start decides."""

    def start(self) -> None:
        super().start()
        name = f"generator.{socket.gethostname()}-{self.process.pid}"
        self._address = self._address.with_name(name)

    @property
    def generator_id(self) -> str:
        return self._address.name.removeprefix("generator.")

    async def listening(self) -> str:
        """Waits for the address alone."""
        while not self._address.exists():
            assert self.process.poll() is None, self.log.read_text()
            await asyncio.sleep(0.01)
        return self._address.read_text()


class Run:
    """One run: its streams, its checkpoint service, and the generators that a test starts."""

    def __init__(self, folder: Path, redis_url: str, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.id = f"run-{os.getpid()}-{abs(hash(folder))}"
        self.model = folder / "model"
        self._url = redis_url
        self._stack = stack
        settings = RedisSettings(**REDIS)
        self.learner = RedisLearnerStreams(redis_url, self.id, "test", settings)
        self.reward = RedisWorkerStreams(redis_url, self.id, "reward", "test", settings)
        self._checkpoint_address = ""
        self._term = 0
        self._names = 0
        self.checkpoint: CheckpointClient

    def make_model(self) -> None:
        """A model folder as the deterministic engine needs it."""
        self.model.mkdir()
        config = {"vocab_size": 50, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
        (self.model / "config.json").write_text(json.dumps(config))
        (self.model / "tokenizer_config.json").write_text("{}")

    async def open(self) -> None:
        """Starts the checkpoint service and takes the learner's place."""
        store = VersionStore(self.folder / "versions", self.id, 3)
        self._servicer = CheckpointServicer(store, lease_seconds=60)
        self._server = rpc.RpcServer(
            RpcSettings(),
            SERVICE_NAME,
            lambda server: add_to_server(self._servicer, server),
        )
        await self._server.start()
        await self._servicer.load()
        self._checkpoint_address = self._server.address
        self.checkpoint = CheckpointClient(self._checkpoint_address, self.id, "test")
        self._term = (await self.checkpoint.acquire_learner("test")).term
        await self.learner.prepare(needed_bytes=0)
        await self.learner.begin_term(self._term)

    async def close(self) -> None:
        await self.checkpoint.close()
        self._servicer.stop_watches()
        await self._server.stop(0)
        await self._servicer.close()
        await self.learner.close()
        await self.reward.close()

    def generator(
        self,
        engine: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Generator:
        """Starts a generator."""
        self._names += 1
        recipe = self._recipe(
            f"generator-{self._names}", {"engine": {**DETERMINISTIC, **(engine or {})}, **settings}
        )
        service = Generator(
            "generator",
            recipe,
            self.folder / self.id,
            member_id=str(self._names),
            environment=environment,
        )
        self._stack.enter_context(service)
        service.start()
        return service

    def _recipe(self, name: str, generator: Mapping[str, Any]) -> Path:
        recipe = {
            "run": {"id": self.id, "directory": str(self.folder)},
            "model": {"path": str(self.model), "dtype": "float32", "max_context": CONTEXT},
            "data": {"train": {"kind": "jsonl", "path": "data.jsonl"}},
            "sampling": {"k": K, "max_tokens": MAX_TOKENS},
            "schedule": {"steps": 1, "prompts_per_step": 1},
            "learner": {"loss": {"name": "online_dpo"}},
            "reward": {"functions": [{"name": "exact_match"}]},
            "generator": dict(generator),
            "checkpoint": {"address": self._checkpoint_address or None},
            "redis": {"url": self._url, **REDIS},
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return file

    async def publish(
        self,
        step: int,
        tensors: Sequence[tuple[str, str, Sequence[int], Buffer]] | None = None,
        parity: Iterable[ParitySequence] = (),
    ) -> int:
        """Publishes a version; returns its number."""
        content = f"weights after step {step}".encode()
        tensors = tensors or [("w", "uint8", [len(content)], content)]
        manifest = describe(tensors)
        manifest.kind = checkpoint.WEIGHTS_KIND_FULL
        manifest.term, manifest.step = self._term, step
        for token_ids, logprobs in parity:
            manifest.parity.sequences.add(token_ids=token_ids, logprobs=logprobs)
        response = await self.checkpoint.publish(
            manifest, [buffer for *_, buffer in tensors], deadline_seconds=60
        )
        return int(response.manifest.version)

    def task(self, ordinal: int, **fields: Any) -> samples.PromptTask:
        """A prompt task as the learner issues it."""
        evaluation = "evaluation_id" in fields
        kind = samples.TASK_KIND_EVALUATION if evaluation else samples.TASK_KIND_TRAIN
        task = samples.PromptTask(
            run_id=self.id,
            ordinal=ordinal,
            term=self._term,
            kind=kind,
            prompt_token_ids=[1, 3, 4],
            prompt_text=f"prompt {ordinal}",
            k=K,
            seeds=[100 * ordinal + index for index in range(K)],
            sampling=samples.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS),
            min_version=1,
        )
        prompt = fields.pop("prompt_token_ids", None)
        if prompt is not None:
            task.prompt_token_ids[:] = prompt
        task.MergeFrom(samples.PromptTask(**fields))
        return task

    async def rollouts(self, count: int) -> dict[int, samples.Rollout]:
        """The next rollouts by ordinal, taken as a reward worker takes them. Exactly `count` come."""
        found: dict[int, samples.Rollout] = {}
        async with asyncio.timeout(60):
            while len(found) < count:
                for delivery in await self.reward.take(64):
                    rollout = delivery.record
                    assert rollout.task.ordinal not in found
                    found[rollout.task.ordinal] = rollout
                    scores = [samples.CompletionScore() for _ in rollout.completions]
                    assert await self.reward.hand_off(
                        delivery, samples.ScoredRollout(scores=scores)
                    )
        return found

    async def dead(self) -> Delivery[samples.DeadLetter]:
        """The next dead letter; groups that were scored meanwhile are passed over."""
        async with asyncio.timeout(60):
            while True:
                for delivery in await self.learner.collect():
                    if isinstance(delivery.record, samples.DeadLetter):
                        return delivery

    async def pending(self) -> dict[Stream, int]:
        """Entries of each stream that somebody holds or could take."""
        return {entry.stream: entry.pending for entry in await self.learner.backlog()}


def versions_of(rollout: samples.Rollout) -> set[int]:
    """Versions of all tokens of a group."""
    return {span.version for c in rollout.completions for span in c.version_spans}


@pytest.fixture
async def run(tmp_path: Path, redis_url: str) -> AsyncIterator[Run]:
    with contextlib.ExitStack() as stack:
        made = Run(tmp_path, redis_url, stack)
        await made.open()
        yield made
        await made.close()
