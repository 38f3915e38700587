"""Rank 0's dealings with a real Redis and a real checkpoint service when one of them forgets; workers by hand."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from redis.asyncio import Redis

from offbeat.config import Recipe, load_recipe
from offbeat.config.service import RedisSettings
from offbeat.errors import WeightsError
from offbeat.ledger import Ledger, read_ledger
from offbeat.local.redis_server import RedisServer
from offbeat.streams.base import Stream
from offbeat.streams.redis import RedisLearnerStreams, RedisWorkerStreams
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.client import CheckpointClient
from services.learner import versions as versions_module
from services.learner.cohorts import Cohorts
from services.learner.coordinator import Coordinator
from services.learner.data.dataset import TrainingPrompts
from services.learner.data.prompts import Prompt
from services.learner.tasks import TaskMaker
from services.learner.versions import Publication
from tests.harness.checkpoints import RUN, Running, serving
from tests.harness.streams import make_rollout, make_scores, until
from tests.harness.whole_run import write_recipe

P = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as running:
        yield running


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    async with serving(tmp_path / "versions") as running:
        yield running


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    schedule = {"steps": 6, "prompts_per_step": P}
    return load_recipe(write_recipe(tmp_path, schedule=schedule), [f"run.id={RUN}"])


def publication(step: int) -> Publication:
    manifest = checkpoint.Manifest(kind=checkpoint.WEIGHTS_KIND_FULL, step=step, update=step)
    payload = np.full(1000, step, dtype=np.uint8)
    return Publication(manifest, [("w", "uint8", (1000,), memoryview(payload))])


class Learner:
    """A learner without the training."""

    def __init__(self, recipe: Recipe, url: str, address: str, folder: Path) -> None:
        prompts = TrainingPrompts([[Prompt("p", [1, 2], {})]], seed=1, shuffle=False)
        self.streams = RedisLearnerStreams(url, RUN, "learner", RedisSettings())
        self.cohorts = Cohorts(prompts_per_step=P, max_lag=1, total_steps=6)
        self.coordinator = Coordinator(
            recipe,
            streams=self.streams,
            weights=CheckpointClient(address, RUN, "learner"),
            cohorts=self.cohorts,
            tasks=TaskMaker(recipe, prompts),
            evaluator=None,
        )
        self._folder = folder

    async def begin(self) -> None:
        """Takes the run over and publishes the first version."""
        term = await self.coordinator.start(
            learner_id="learner", term_floor=0, version_floor=0, needed_bytes=0
        )
        self.coordinator.ledger = Ledger(self._folder, term)
        await self.publish(0)

    async def publish(self, step: int) -> int:
        return await self.coordinator.publish(publication(step), evaluate=False, whole=False)

    async def close(self) -> None:
        await self.coordinator.close(finished=False)


class Workers:
    """One of each role; groups are made up, by version 1."""

    def __init__(self, url: str) -> None:
        self.generator = RedisWorkerStreams(url, RUN, "generator", "g", RedisSettings())
        self.reward = RedisWorkerStreams(url, RUN, "reward", "r", RedisSettings())

    async def work(self, count: int) -> None:
        """Takes that many groups through to the learner."""
        left = count
        while left:
            for delivery in await self.generator.take(left, held_version=99):
                rollout = make_rollout(delivery.record)
                await self.generator.hand_off(delivery, rollout)
            for delivery in await self.reward.take(64):
                scores = make_scores(delivery.record)
                left -= await self.reward.hand_off(delivery, scores)

    async def close(self) -> None:
        await self.generator.close()
        await self.reward.close()


async def test_a_version_that_the_service_lost_is_published_again(
    recipe: Recipe, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is gone, and Redis with it, so nothing but the learner remembers which numbers were given."""
    monkeypatch.setattr(versions_module, "LOOK_SECONDS", 0.1)
    async with serving(tmp_path / "versions") as service:
        port = service.server.port
        learner = Learner(recipe, server.url, service.address, tmp_path)
        await learner.begin()
        assert await learner.publish(1) == 2
        before = service.store.manifest(2)
    shutil.rmtree(tmp_path / "versions")
    async with serving(tmp_path / "versions", port=port) as service:

        async def there_again() -> bool:
            # The learner hears of it after the service has it.
            return 3 in learner.cohorts.lineage.versions

        await until(there_again, "the version")
        again = service.store.latest().manifest
        assert again.version == 3
        assert (again.parent, again.step) == (2, 1)
        assert again.weights_digest == before.weights_digest
        assert learner.cohorts.lineage.versions == {1: (0, 0), 2: (1, 1), 3: (1, 1)}
        assert learner.cohorts.min_version(2) == 3
        assert await learner.publish(2) == 4
        events = read_ledger(tmp_path)[1]
        published = [event["version"] for event in events if event["event"] == "publish"]
        assert published == [1, 2, 3, 4]
        await learner.close()


async def test_without_a_copy_the_learner_ends_and_says_why(
    recipe: Recipe, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions_module, "LOOK_SECONDS", 0.1)
    checkpoints = recipe.checkpoint.model_copy(update={"deltas": False})
    recipe = recipe.model_copy(update={"checkpoint": checkpoints})
    async with serving(tmp_path / "versions") as service:
        port = service.server.port
        learner = Learner(recipe, server.url, service.address, tmp_path)
        await learner.begin()
    shutil.rmtree(tmp_path / "versions")
    async with serving(tmp_path / "versions", port=port):
        with pytest.raises(WeightsError, match=r"has lost version 1.*last checkpoint"):
            await learner.coordinator.cohort(30)
        await learner.close()


async def test_an_entry_that_comes_twice_stays_until_a_checkpoint_has_it(
    recipe: Recipe, server: RedisServer, service: Running, tmp_path: Path
) -> None:
    """A Redis that was rolled back delivers what the learner has. Settled now, the next learner would miss it."""
    learner, workers = Learner(recipe, server.url, service.address, tmp_path), Workers(server.url)
    await learner.begin()
    await workers.work(P)
    trained = await learner.coordinator.cohort(20)
    assert [ordinal for ordinal, _ in trained] == list(range(P))
    await workers.work(P)  # the second cohort's groups are collected and not trained
    await until(lambda: _settled(learner), "the second cohort")
    keys = learner.streams._keys
    async with Redis.from_url(server.url) as client:
        await client.xgroup_setid(keys.stream(Stream.SCORED), "learner", "0")
        learner.streams._collected.clear()

        async def delivered_again() -> bool:
            return len(learner.streams._collected) == 2 * P

        await until(delivered_again, "the second delivery")
        await asyncio.sleep(0.1)
        assert await client.xlen(keys.stream(Stream.SCORED)) == 2 * P
    assert sorted(await learner.streams.in_flight()) == list(range(2 * P))
    await learner.coordinator.settle(1)
    assert sorted(await learner.streams.in_flight()) == list(range(P, 2 * P))
    await learner.close()
    await workers.close()


async def _settled(learner: Learner) -> bool:
    places = learner.cohorts.places
    return bool(places) and all(place.settled for place in places)


async def test_a_learner_that_hurries_waits_for_nobody(
    recipe: Recipe, server: RedisServer, service: Running, tmp_path: Path
) -> None:
    learner = Learner(recipe, server.url, service.address, tmp_path)
    await learner.begin()
    waiting = asyncio.create_task(learner.coordinator.cohort(3600))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await learner.coordinator.hurry()
    assert await waiting is None
    await learner.close()
