"""A process's connection to Redis, on real servers."""

import asyncio
import random

from offbeat.streams.link import Link


async def test_a_cancelled_task_ends_wherever_it_was(url: str) -> None:
    """A library that forgets a cancellation leaves a process that was told to stop waiting for ever."""
    link = Link(url, outage_seconds=30)
    chance = random.Random(1)

    async def ask_for_ever() -> None:
        while True:
            await link.ask("anything", "get", "a")

    for _ in range(100):
        task = asyncio.create_task(ask_for_ever())
        await asyncio.sleep(chance.random() * 0.002)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=20)
        assert done
    await link.close()
