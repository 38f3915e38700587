"""(i) Growth: what a sample costs as generators, backlog, steps and completions get larger. Linear is the goal."""

import asyncio
import time
from typing import Any

from benchmarks.suite import sample_path
from benchmarks.suite.cells import AT_MOST, CellSpec, Row
from benchmarks.suite.emulated.devices import Devices
from benchmarks.suite.fixtures import merged, recipe_tree, redis_server, tiny_model, train_tasks
from benchmarks.suite.options import Options
from benchmarks.suite.runs import EMULATED, RunResult, run

GENERATORS = (1, 2, 4, 8)
BACKLOGS = (1_000, 10_000, 100_000, 1_000_000)
STEPS = (100, 1_000, 10_000)
LENGTHS = (1_024, 8_192, 32_768)
SLOTS, TOKENS, DECODE_SECONDS = 16, 20, 0.02
SKIP = 3
RUN = "growth"


def cells(options: Options) -> list[CellSpec]:
    """One cell for each thing that grows."""
    return [
        CellSpec("i", "generators", lambda: generators(options)),
        CellSpec("i", "in flight", lambda: asyncio.run(in_flight(options))),
        CellSpec("i", "prompts per step", lambda: prompts_per_step(options)),
        CellSpec("i", "long completions", lambda: long_completions(options)),
    ]


def generators(options: Options) -> list[Row]:
    """Groups per second and CPU per group with 1 to 8 emulated generators, each as fast as ever."""
    rows = []
    first = None
    for count in GENERATORS[:2] if options.quick else GENERATORS:
        # A step takes as long as ever, with more groups in it; the generators are what limits.
        groups = count * SLOTS * 5
        result = _emulated(options, f"generators-{count}", groups, replicas=count, steps=8)
        rate = [groups / seconds for seconds in result.step_seconds(SKIP)]
        ideal = count * SLOTS / 2 / (TOKENS * DECODE_SECONDS)
        rows.append(Row(f"{count}: rate ÷ what the engines can do", [r / ideal for r in rate], "x"))
        cost = _cpu_of_a_group(result, groups)
        first = first or cost
        rows.append(Row(f"{count}: CPU of all services per group", [cost], "ms"))
        rows.append(Row(f"{count}: CPU per group ÷ with 1", [cost / first], "x", (AT_MOST, 1.1)))
    return rows


def _cpu_of_a_group(result: RunResult, groups: int) -> float:
    """Milliseconds of all services."""
    return 1000 * result.cpu_of_a_step(skip=SKIP) / groups


def prompts_per_step(options: Options) -> list[Row]:
    """CPU of the learner and of all services per group, with up to 10,000 prompts in a step."""
    rows, first = [], None
    for groups in STEPS[:2] if options.quick else STEPS:
        result = _emulated(
            options,
            f"prompts-{groups}",
            groups,
            replicas=1,
            steps=6,
            decode_seconds=0.0005,
            slots=256,
        )
        cost = _cpu_of_a_group(result, groups)
        first = first or cost
        rows.append(Row(f"{groups}: CPU of all services per group", [cost], "ms"))
        rows.append(Row(f"{groups}: ÷ with {STEPS[0]}", [cost / first], "x", (AT_MOST, 1.1)))
    return rows


def _emulated(
    options: Options,
    name: str,
    groups: int,
    *,
    replicas: int,
    steps: int,
    slots: int = SLOTS,
    decode_seconds: float = DECODE_SECONDS,
) -> RunResult:
    devices = Devices(
        slots=slots, decode_seconds=decode_seconds, train_seconds=0.05, weights_mb=1.0
    )
    changes = {
        "schedule": {"steps": steps, "prompts_per_step": groups, "max_lag": 2},
        "sampling": {"k": 2, "max_tokens": TOKENS},
        "generator.replicas": replicas,
        "reward.max_groups": 64,
    }
    tree = merged(recipe_tree(tiny_model(options.scratch), options, prompts=1000), changes)
    return run(
        tree, options.scratch, name=f"growth-{name}", program=EMULATED,
        environment=devices.environment(),
    )  # fmt: skip


async def in_flight(options: Options) -> list[Row]:
    """Seconds for a group to be issued, taken and handed off while so many others are in flight."""
    rows, first = [], None
    with redis_server(max_memory_mb=6000) as server:
        streams = await _Streams.start(server.url)
        held = 0
        for backlog in BACKLOGS[:2] if options.quick else BACKLOGS:
            await streams.issue(backlog - held)
            held = backlog
            costs = [await streams.round(256) for _ in range(options.rounds(5))]
            first = first or sorted(costs)[len(costs) // 2]
            rows.append(Row(f"{backlog}: wall per group", [1000 * cost for cost in costs], "ms"))
            relative = [cost / first for cost in costs]
            rows.append(Row(f"{backlog}: ÷ with {BACKLOGS[0]}", relative, "x", (AT_MOST, 1.1)))
            rows.append(Row(f"{backlog}: look for lost ones", [await streams.search()], "s"))
        await streams.close()
    return rows


class _Streams:
    """A learner and a generator on streams that hold a backlog."""

    def __init__(self, learner: Any, generator: Any) -> None:
        self._learner, self._generator = learner, generator
        self._next = 0

    @classmethod
    async def start(cls, url: str) -> "_Streams":
        from offbeat.config.service import RedisSettings
        from offbeat.streams.redis import RedisLearnerStreams, RedisWorkerStreams

        settings = RedisSettings(url=url, max_hold_seconds=6000)
        learner = RedisLearnerStreams(url, RUN, "learner", settings)
        await learner.prepare(needed_bytes=0)
        await learner.begin_term(1)
        generator = RedisWorkerStreams(url, RUN, "generator", "generator", settings)
        await generator.announce("", {})
        return cls(learner, generator)

    async def issue(self, count: int) -> None:
        """Adds tasks."""
        prompt = list(range(1000, 1016))
        while count > 0:
            some = min(count, 1024)
            tasks = train_tasks(RUN, self._next, [prompt] * some, k=2, max_tokens=24, min_version=1)
            await self._learner.issue(tasks)
            self._next += some
            count -= some

    async def round(self, count: int) -> float:
        """Seconds for each of `count` groups, issued, taken and handed off."""
        from services.generator.records import rollout_of

        generated = sample_path._generated(1024)
        started = time.perf_counter()
        await self.issue(count)
        done = 0
        while done < count:
            found = await self._generator.take(64, held_version=1)
            await asyncio.gather(
                *(
                    self._generator.hand_off(
                        one, rollout_of(one.record, generated, generator_id="g", started_unix_ms=1)
                    )
                    for one in found
                )
            )
            done += len(found)
        return (time.perf_counter() - started) / count

    async def search(self) -> float:
        """Seconds to list what is in flight, as the learner does after a minute without news."""
        started = time.perf_counter()
        await self._learner.in_flight()
        return time.perf_counter() - started

    async def close(self) -> None:
        await self._learner.close()
        await self._generator.close()


def long_completions(options: Options) -> list[Row]:
    """CPU of the sample path per token, for completions of up to 32k tokens."""
    rows, first = [], None
    for length in LENGTHS[:2] if options.quick else LENGTHS:
        size = 300 + length * sample_path.K * 11
        found = sample_path.measure(size, max(8, 131_072 // length), options)
        by_name = {row.name: row for row in found}
        cost = [
            1e6 * ms / (length * sample_path.K) for ms in by_name["Python, CPU per group"].values
        ]
        first = first or sorted(cost)[len(cost) // 2]
        rows.append(Row(f"{length} tokens: Python, CPU per token", cost, "ns"))
        relative = [value / first for value in cost]
        rows.append(Row(f"{length} tokens: ÷ with {LENGTHS[0]}", relative, "x", (AT_MOST, 1.1)))
    return rows
