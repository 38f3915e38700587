"""(e) The sample path: CPU seconds per group from sampled tokens to training tensors, through a real Redis.

The functions and stream adapters are those of the services, one after the other in this process, so that each one's CPU
can be told apart; Redis is a process of its own. Beside it the same bytes through bare Redis: for each of the three
streams XADD, XREADGROUP, XACK and XDEL, by the same client library.

A sample is one stream entry: a group of two completions. Its size is that of the serialized `Rollout`.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.suite.cells import AT_MOST, CellSpec, Row
from benchmarks.suite.fixtures import redis_server, train_tasks
from benchmarks.suite.measure import Spent, ratios
from benchmarks.suite.options import Options

RUN = "sample-path"
K = 2
SIZES = {"4 KB": (4096, 512), "64 KB": (65_536, 192), "1 MB": (1_048_576, 24)}
"""Bytes of a group, and groups in a round."""
STAGES = ("issue", "generator", "reward", "learner")


def cells(options: Options) -> list[CellSpec]:
    """A cell for each size."""
    return [
        CellSpec("e", name, lambda size=size, count=count: measure(size, count, options))
        for name, (size, count) in SIZES.items()
    ]


def measure(size: int, count: int, options: Options) -> list[Row]:
    """The rows of one size."""
    count = 8 if options.quick else count
    with redis_server() as server:
        found = asyncio.run(_rounds(server.url, size, count, options.rounds(7)))
    milliseconds = {name: [1000 * value for value in values] for name, values in found.items()}
    python = [sum(parts) for parts in zip(*(milliseconds[stage] for stage in STAGES), strict=True)]
    target = (AT_MOST, 0.3) if size == 4096 else None
    return [
        Row("Python, CPU per group", python, "ms", target),
        *(Row(f"of it {stage}", milliseconds[stage], "ms") for stage in STAGES),
        Row("bare Redis client, CPU per group", milliseconds["bare"], "ms"),
        Row("Python ÷ bare client", ratios(python, milliseconds["bare"]), "x"),
        Row("Redis, CPU per group", milliseconds["redis"], "ms"),
        Row("Redis, bare commands", milliseconds["bare redis"], "ms"),
        Row(
            "Redis ÷ bare commands", ratios(milliseconds["redis"], milliseconds["bare redis"]), "x"
        ),
        Row("groups per second that Redis can take", [1 / s for s in found["redis"]], "1/s"),
        Row("cores of Python that fill it", ratios(python, milliseconds["redis"]), "cores"),
        Row("CPU per KiB", [value / (size / 1024) for value in python], "ms"),
    ]


async def _rounds(url: str, size: int, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of CPU per group, by stage, in each round; the first round does not count."""
    path = await SamplePath.start(url, size, count)
    bare = await BarePath.start(url, size, count)
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        spent, before = Spent(), await bare.server_seconds()
        await path.round(spent)
        between = await bare.server_seconds()
        with spent.on("bare"):
            await bare.round()
        after = await bare.server_seconds()
        spent.cpu |= {"redis": between - before, "bare redis": after - between}
        if number:
            for name, seconds in spent.cpu.items():
                found.setdefault(name, []).append(seconds / count)
    await path.close()
    await bare.close()
    return found


def tokens_for(size: int) -> int:
    """Tokens of each of K completions in a group of `size` bytes: ids, log-probs and text, and the task's own bytes."""
    return max(1, (size - 300) // (K * 11))


@dataclass
class SamplePath:
    """The services' own code, from `GeneratedCompletion` to tensors."""

    count: int
    learner: Any
    generator: Any
    reward: Any
    worker: Any
    cohorts: Any
    generated: Any
    first: int = 0

    @classmethod
    async def start(cls, url: str, size: int, count: int) -> "SamplePath":
        from offbeat.config.service import RedisSettings
        from offbeat.streams.redis import RedisLearnerStreams, RedisWorkerStreams
        from services.learner.cohorts import Cohorts

        settings = RedisSettings(url=url)
        learner = RedisLearnerStreams(url, RUN, "learner", settings)
        await learner.prepare(needed_bytes=0)
        await learner.begin_term(1)
        generator = RedisWorkerStreams(url, RUN, "generator", "generator", settings)
        reward = RedisWorkerStreams(url, RUN, "reward", "reward", settings)
        for member in (generator, reward):
            await member.announce("", {})
        cohorts = Cohorts(prompts_per_step=count, max_lag=1000, total_steps=16)
        cohorts.lineage.add(1, 0, 0)
        cohorts.admit()
        worker = _reward_worker(reward)
        return cls(count, learner, generator, reward, worker, cohorts, _generated(size))

    async def round(self, spent: Spent) -> None:
        """A cohort's way."""
        prompts = [list(range(1000, 1064))] * self.count
        tasks = train_tasks(RUN, self.first, prompts, k=K, max_tokens=2**20, min_version=1)
        self.first += self.count
        with spent.on("issue"):
            await self.learner.issue(tasks)
        with spent.on("generator"):
            await self._generate()
        with spent.on("reward"):
            await self._score()
        with spent.on("learner"):
            done = await self._to_tensors()
        await self.learner.settle(done, [task.ordinal for task in tasks])

    async def _generate(self) -> None:
        from services.generator.records import now_unix_ms, requests_of, rollout_of

        async def one(delivery: Any) -> None:
            requests_of(delivery.record, run_id=RUN, vocab_size=49_152)
            rollout = rollout_of(
                delivery.record, self.generated, generator_id="g", started_unix_ms=now_unix_ms()
            )
            await self.generator.hand_off(delivery, rollout)

        done = 0
        while done < self.count:
            found = await self.generator.take(64, held_version=1)
            await asyncio.gather(*map(one, found))
            done += len(found)

    async def _score(self) -> None:
        """The reward worker's own loop, until everything went through."""
        stop = asyncio.Event()
        running = asyncio.create_task(self.worker.run(stop))
        goal = self.worker.counters_at_start + self.count
        while self.worker.done() < goal and not running.done():
            await asyncio.sleep(0.002)
        self.worker.counters_at_start = goal
        stop.set()
        await running

    async def _to_tensors(self) -> list[Any]:
        from services.learner.batching import StepBatch, rows_in, shares
        from services.learner.entries import malformed, without_payload
        from services.learner.groups import to_group

        collected = 0
        while collected < self.count:
            for delivery in await self.learner.collect(limit=64):
                assert malformed(delivery.record) is None
                self.cohorts.add_group(delivery)
                collected += 1
        step = self.cohorts.next_step
        places = [place for _, place in self.cohorts.pop()]
        groups = [to_group(self.cohorts, step, place.group) for place in places]
        batch = StepBatch(groups, lambda rewards: [tuple(range(len(rewards)))])
        units = [unit for of_group in batch.units for unit in of_group]
        plan = shares(units, batch.total_lengths, world=1, max_tokens=8192, bucket=True)[0]
        for micro_batch in plan:
            rows = rows_in(micro_batch)
            batch.collate(rows)
            batch.padded(batch.behaviour, rows)
            batch.padded(batch.mask, rows)
        return [without_payload(place.delivery) for place in places]

    async def close(self) -> None:
        for streams in (self.learner, self.generator, self.reward):
            await streams.close()


def _generated(size: int) -> list[Any]:
    from services.generator.engines.base import GeneratedCompletion

    rng = np.random.default_rng(0)
    length = tokens_for(size)
    return [
        GeneratedCompletion(
            token_ids=rng.integers(3, 49_152, length).tolist(),
            logprobs=(-rng.exponential(1.0, length)).tolist(),
            version_spans=[(1, length)],
            finish_reason="stop",
            stop_string="",
            text="word " * (4 * length // 5),
        )
        for _ in range(K)
    ]


def _reward_worker(streams: Any) -> Any:
    from offbeat.config.workers import RewardFunction, RewardSettings
    from services.reward.calling import Scorer
    from services.reward.counters import Counters
    from services.reward.functions import load_functions
    from services.reward.worker import Worker

    function = RewardFunction(name="letters", path="benchmarks.suite.rewards:constant")
    settings = RewardSettings(functions=[function])
    counters = Counters()

    class Counted(Worker):
        """Tells how many groups it has handed on."""

        counters_at_start = 0

        def done(self) -> int:
            return int(counters.groups_finished)

    async def alive(_: bool) -> None:
        pass

    scorer = Scorer(load_functions([function]), settings.timeout_seconds, counters)
    return Counted(
        streams, scorer, settings, counters, worker_id="r", beat_seconds=5.0, on_alive=alive
    )


@dataclass
class BarePath:
    """The same bytes through three streams, by nothing but the client library's commands."""

    redis: Any
    payloads: tuple[bytes, ...]
    count: int

    @classmethod
    async def start(cls, url: str, size: int, count: int) -> "BarePath":
        from offbeat.streams.link import connect

        redis = connect(url)
        for index in range(3):
            await redis.xgroup_create(f"bare:{index}", "readers", "0", mkstream=True)
        return cls(redis, (bytes(300), bytes(size), bytes(size)), count)

    async def round(self) -> None:
        """Every payload once through each stream."""
        for index, payload in enumerate(self.payloads):
            key = f"bare:{index}"
            for _ in range(0, self.count, 64):
                entries = min(64, self.count)
                await asyncio.gather(
                    *(self.redis.xadd(key, {"p": payload}) for _ in range(entries))
                )
            left = self.count
            while left > 0:
                reply = await self.redis.xreadgroup("readers", "one", {key: ">"}, count=64)
                ids = [entry_id for entry_id, _ in reply[0][1]]
                await self.redis.xack(key, "readers", *ids)
                await self.redis.xdel(key, *ids)
                left -= len(ids)

    async def server_seconds(self) -> float:
        """CPU seconds of the server so far, its helper threads included."""
        info = await self.redis.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])

    async def close(self) -> None:
        await self.redis.aclose()
