"""The sample streams under test: one run on one of the adapters, and records to send through it.

run = StreamsRun(MemoryServer())      # or StreamsRun(url)
learner = await run.learner()
worker = run.worker("generator")
...
await run.close()
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar, get_args

from redis.asyncio import Redis

from offbeat.config.service import RedisSettings
from offbeat.streams.base import Delivery, LearnerStreams, Stream, WorkerStreams
from offbeat.streams.keys import GROUPS, Keys, Role
from offbeat.streams.memory import MemoryLearnerStreams, MemoryServer, MemoryWorkerStreams
from offbeat.streams.redis import RedisLearnerStreams, RedisWorkerStreams
from offbeat.v1 import samples_pb2 as samples

T = TypeVar("T")

PATIENCE_SECONDS = 20.0

_runs = itertools.count()


class StreamsRun:
    """One run and everything that was opened on it. `server` is a URL, or a `MemoryServer`."""

    def __init__(self, server: str | MemoryServer, **settings: float) -> None:
        self.settings = RedisSettings(**settings)
        self.server = server
        self.run_id = f"run-{next(_runs)}"
        self.keys = Keys(self.run_id)
        self._names = itertools.count()
        self._opened: list[WorkerStreams | LearnerStreams] = []
        self._ahead = 0.0
        self.client = Redis.from_url(server if isinstance(server, str) else "redis://")
        """Reads and changes the server behind the adapters' backs."""
        if isinstance(server, MemoryServer):
            server.clock = lambda: time.monotonic() + self._ahead

    def worker(self, role: Role = "generator", name: str = "") -> WorkerStreams:
        """A worker as its process would make it."""
        name = name or f"{role}-{next(self._names)}"
        worker: WorkerStreams
        if isinstance(self.server, MemoryServer):
            worker = MemoryWorkerStreams(self.server, role, name, self.settings)
        else:
            worker = RedisWorkerStreams(self.server, self.run_id, role, name, self.settings)
        self._opened.append(worker)
        return worker

    def visitor(self, name: str = "learner") -> LearnerStreams:
        """A learner without a term."""
        learner: LearnerStreams
        if isinstance(self.server, MemoryServer):
            learner = MemoryLearnerStreams(self.server, name, self.settings)
        else:
            learner = RedisLearnerStreams(self.server, self.run_id, name, self.settings)
        self._opened.append(learner)
        return learner

    async def learner(self, term: int = 1, name: str = "learner") -> LearnerStreams:
        """A learner that has begun `term`."""
        learner = self.visitor(name)
        await learner.prepare(needed_bytes=0)
        await learner.begin_term(term)
        return learner

    async def idle(self) -> None:
        """Lets the minimum idle time pass, without waiting for it."""
        if isinstance(self.server, MemoryServer):
            self._ahead += self.settings.min_idle_seconds
            return
        for stream in Stream:
            await self._age(self.keys.stream(stream), GROUPS[stream])
        for role in get_args(Role):
            beats = await self.client.zrange(self.keys.members(role), 0, -1, withscores=True)
            for member, beat in beats:
                await self.client.zadd(self.keys.members(role), {member: beat - self._idle_ms})

        # Somebody was heard of all the time.
        if await self.client.hexists(self.keys.awake, "since"):
            await self.client.hincrby(self.keys.awake, "since", -self._idle_ms)

    async def silence(self) -> None:
        """Lets the minimum idle time pass, in which nobody at all was heard of."""
        await self.idle()
        await self.client.hincrby(self.keys.awake, "seen", -self._idle_ms)

    @property
    def _idle_ms(self) -> int:
        return int(1000 * self.settings.min_idle_seconds)

    async def _age(self, stream: str, group: str) -> None:
        """Makes all pending entries idle for the minimum idle time; owners and counts stay."""
        for row in await self.client.xpending_range(stream, group, "-", "+", 1000):
            owner, entry_id = row["consumer"], row["message_id"]
            idle = row["time_since_delivered"] + self._idle_ms
            await self.client.xclaim(stream, group, owner, 0, [entry_id], idle=idle, justid=True)

    async def empty(self) -> None:
        """Loses all data of the run."""
        if isinstance(self.server, MemoryServer):
            self.server.empty()
            return
        await self.client.flushall()

    async def add(self, stream: Stream, fields: Mapping[bytes, bytes]) -> None:
        """Adds an entry behind the adapters' backs."""
        if isinstance(self.server, MemoryServer):
            self.server.add(stream, fields)
            return
        await self.client.xadd(self.keys.stream(stream), dict(fields))

    async def entries(self, stream: Stream) -> list[dict[bytes, bytes]]:
        """Fields of everything that lies on a stream."""
        if isinstance(self.server, MemoryServer):
            return [entry.fields for entry in self.server.streams[stream].values()]
        return [fields for _, fields in await self.client.xrange(self.keys.stream(stream))]

    async def attempts(self, stream: Stream) -> list[tuple[int, int]]:
        """(ordinal, attempt) of everything that lies on a stream."""
        return [(int(f[b"o"]), int(f[b"a"])) for f in await self.entries(stream)]

    async def close(self) -> None:
        """Closes what was opened."""
        for opened in self._opened:
            await opened.close()
        await self.client.aclose()


async def until(look: Callable[[], Awaitable[T]], what: str) -> T:
    """Looks again and again until there is something to see."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = await look()
        if found:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"waited {PATIENCE_SECONDS:g} s for {what}")


def make_task(ordinal: int, *, evaluation_id: str = "", **fields: int) -> samples.PromptTask:
    """A valid prompt task."""
    kind = samples.TASK_KIND_EVALUATION if evaluation_id else samples.TASK_KIND_TRAIN
    return samples.PromptTask(
        **{"run_id": "run", "ordinal": ordinal, "term": 1, "k": 2, **fields},
        kind=kind,
        evaluation_id=evaluation_id,
        prompt_token_ids=[1, 2, 3],
        prompt_text=f"prompt {ordinal}",
        seeds=[ordinal, ordinal + 1],
        sampling=samples.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=8),
    )


def make_tasks(count: int, **fields: int) -> list[samples.PromptTask]:
    """Tasks of ordinals 0, 1, ..."""
    return [make_task(ordinal, **fields) for ordinal in range(count)]


def make_rollout(task: samples.PromptTask) -> samples.Rollout:
    """A valid group for a task."""
    completions = [
        samples.Completion(
            token_ids=[5, 6],
            logprobs=[-0.5, -0.25],
            version_spans=[samples.VersionSpan(version=1, count=2)],
            finish_reason=samples.FINISH_REASON_STOP,
            seed=seed,
        )
        for seed in task.seeds
    ]
    return samples.Rollout(task=task, completions=completions, generator_id="generator")


def make_scores(rollout: samples.Rollout) -> samples.ScoredRollout:
    """Scores for a group, as a reward worker hands them off."""
    scores = [samples.CompletionScore(total=0.5 * index) for index in range(rollout.task.k)]
    return samples.ScoredRollout(scores=scores, reward_worker_id="reward")


def make_result(delivery: Delivery) -> samples.Rollout | samples.ScoredRollout:
    """The result that a worker hands off for a delivery."""
    record = delivery.record
    return make_rollout(record) if isinstance(record, samples.PromptTask) else make_scores(record)


async def pass_on(worker: WorkerStreams, limit: int = 1000) -> list[Delivery]:
    """Takes what the worker gets now, and hands it off."""
    taken = await worker.take(limit, held_version=10**6, wait_seconds=0.0)
    for delivery in taken:
        assert await worker.hand_off(delivery, make_result(delivery))
    return taken


def ordinals(deliveries: list[Delivery]) -> list[int]:
    """Ordinals of deliveries of any kind."""
    found = []
    for delivery in deliveries:
        record = delivery.record
        if isinstance(record, samples.ScoredRollout):
            record = record.rollout
        task = record.task if isinstance(record, samples.Rollout) else record
        found.append(task.ordinal)
    return found
