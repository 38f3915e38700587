"""The worker's loop on streams in memory: what is hard to bring about in a process of its own."""

import asyncio

import pytest

from offbeat.config.service import RedisSettings
from offbeat.config.workers import RewardFunction, RewardSettings
from offbeat.streams.memory import MemoryLearnerStreams, MemoryServer, MemoryWorkerStreams
from offbeat.v1 import samples_pb2
from services.reward.calling import Scorer
from services.reward.counters import Counters
from services.reward.functions.registry import describe
from services.reward.scoring import Role
from services.reward.worker import Worker

REDIS = RedisSettings(min_idle_seconds=0.3, beat_seconds=0.02)


@pytest.fixture
async def learner_and_server():
    server = MemoryServer()
    learner = MemoryLearnerStreams(server, "learner", REDIS)
    await learner.prepare(needed_bytes=0)
    await learner.begin_term(1)
    generator = MemoryWorkerStreams(server, "generator", "g", REDIS)
    tasks = [_task(ordinal) for ordinal in range(3)]
    await learner.issue(tasks)
    for _ in tasks:
        for delivery in await generator.take(3, wait_seconds=0.01):
            await generator.hand_off(delivery, _rollout(delivery.record))
    return learner, server


def _task(ordinal):
    return samples_pb2.PromptTask(
        run_id="r",
        ordinal=ordinal,
        term=1,
        kind=samples_pb2.TASK_KIND_TRAIN,
        prompt_token_ids=[1],
        prompt_text=str(ordinal),
        k=1,
        seeds=[1],
        sampling=samples_pb2.SamplingParams(max_tokens=1),
    )


def _rollout(task):
    completion = samples_pb2.Completion(
        token_ids=[1],
        logprobs=[0.0],
        version_spans=[samples_pb2.VersionSpan(version=1, count=1)],
        finish_reason=samples_pb2.FINISH_REASON_STOP,
        text="abc",
    )
    return samples_pb2.Rollout(task=task, completions=[completion])


def _worker(server, function, name, on_alive=None, **settings):
    item = RewardFunction(name="f")
    made = RewardSettings(functions=[item], **settings)
    counters = Counters()
    described = describe("key", item, function, Role.SCORE, frozenset())

    async def ignore(alive):
        pass

    return Worker(
        MemoryWorkerStreams(server, "reward", name, REDIS),
        Scorer([described], made.timeout_seconds, counters),
        made,
        counters,
        worker_id=name,
        beat_seconds=REDIS.beat_seconds,
        on_alive=on_alive or ignore,
    )


async def _collect(learner, count):
    found = []
    while len(found) < count:
        found += await learner.collect(wait_seconds=0.05)
    return found


async def test_a_wedged_worker_is_not_alive_and_its_groups_go_to_a_peer(learner_and_server):
    learner, server = learner_and_server
    release, dead = asyncio.Event(), asyncio.Event()

    async def wedged(completions):
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue  # takes no notice of the time limit
        return [0.0] * len(completions)

    async def on_alive(alive):
        if not alive:
            dead.set()

    stop = asyncio.Event()
    first = _worker(server, wedged, "first", on_alive, timeout_seconds=0.1)
    running = [asyncio.create_task(first.run(stop))]
    await dead.wait()
    peer = _worker(server, lambda completions: [1.0] * len(completions), "peer")
    running.append(asyncio.create_task(peer.run(stop)))
    results = await _collect(learner, 3)
    assert {r.record.reward_worker_id for r in results} == {"peer"}
    release.set()
    stop.set()
    await asyncio.gather(*running)
    assert await learner.collect(wait_seconds=0.05) == []


async def test_a_batch_that_fails_is_scored_group_by_group(learner_and_server):
    learner, server = learner_and_server
    calls = []

    def function(prompts):
        calls.append(list(prompts))
        if "1" in prompts:
            raise ValueError("not this one")
        return [1.0] * len(prompts)

    stop = asyncio.Event()
    worker = _worker(server, function, "w")
    running = asyncio.create_task(worker.run(stop))
    results = await _collect(learner, 3)
    stop.set()
    await running
    assert (
        sorted(type(r.record).__name__ for r in results) == ["DeadLetter"] + ["ScoredRollout"] * 2
    )
    # All three together, each by itself, and the bad one once more, alone.
    assert calls == [["0", "1", "2"], ["0"], ["1"], ["2"], ["1"]]
    assert worker._counters.groups_dead == 1
    assert worker._counters.groups_finished == 2


async def test_a_worker_whose_heartbeats_end_ends_too_and_gives_its_groups_back(learner_and_server):
    """Otherwise it would hold groups that are claimed by others, again and again, and nobody would notice."""
    learner, server = learner_and_server
    scoring = asyncio.Event()

    async def endless(completions):
        scoring.set()
        await asyncio.sleep(600)

    async def on_alive(alive):
        if scoring.is_set():
            raise OSError("the heartbeat can't go on")

    worker = _worker(server, endless, "w", on_alive)
    with pytest.raises(OSError, match="can't go on"):
        await worker.run(asyncio.Event())
    stop = asyncio.Event()
    peer = _worker(server, lambda completions: [1.0] * len(completions), "peer")
    running = asyncio.create_task(peer.run(stop))
    results = await _collect(learner, 3)
    assert {result.record.reward_worker_id for result in results} == {"peer"}
    stop.set()
    await running
