"""Many receivers of one step's delta, at the service itself or behind relays: seconds, and what the service sends."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.suite.cells import AT_MOST, Row
from benchmarks.weights.processes import RUN, service, staged
from benchmarks.weights.transfer import Publisher
from benchmarks.weights.versions import Weights
from offbeat.weights.client import CheckpointClient

LEAVES = 4
"""Relays that serve receivers, behind one relay that mirrors the service."""


def measure(versions: Iterator[Weights], *, receivers: int, tree: bool, rounds: int) -> list[Row]:
    """The rows of a cell."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-weights-") as folder,
        tempfile.TemporaryDirectory(prefix="offbeat-weights-", dir=memory) as staging,
    ):
        return asyncio.run(_measure(versions, receivers, tree, rounds, Path(folder), Path(staging)))


async def _measure(
    versions: Iterator[Weights],
    count: int,
    tree: bool,
    rounds: int,
    folder: Path,
    staging: Path,
) -> list[Row]:
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(service(folder / "root"))
        addresses = [root.address]
        if tree:
            relay = await stack.enter_async_context(service(folder / "relay", root.address))
            leaves = [
                await stack.enter_async_context(service(folder / f"leaf{index}", relay.address))
                for index in range(LEAVES)
            ]
            addresses = [leaf.address for leaf in leaves]
        publisher = Publisher(root.address, versions)
        stack.push_async_callback(publisher.client.close)
        receivers = [
            CheckpointClient(addresses[index % len(addresses)], RUN, f"r{index}", deltas=True)
            for index in range(count)
        ]
        for receiver in receivers:
            stack.push_async_callback(receiver.close)

        async def stage_all() -> None:
            # One after the other in full, as they would join a run; the deltas all at once.
            first = publisher.step == 1
            for index, receiver in enumerate(receivers if first else []):
                await staged(receiver, staging / str(index), publisher.newest)
            if not first:
                await asyncio.gather(
                    *(
                        staged(receiver, staging / str(index), publisher.newest)
                        for index, receiver in enumerate(receivers)
                    )
                )

        await publisher.next()
        await stage_all()
        seconds, sent = [], []
        for _ in range(rounds):
            before = (await publisher.client.status()).sent_bytes
            started = time.perf_counter()
            await publisher.next()
            await stage_all()
            seconds.append(time.perf_counter() - started)
            sent.append((await publisher.client.status()).sent_bytes - before)
        size = publisher.client.counts.bytes["delta"] / publisher.client.counts.transfers["delta"]
        return [
            Row("hashed to staged by all", seconds, "s"),
            Row(
                "sent by the service per step ÷ one delta",
                [value / size for value in sent],
                "x",
                (AT_MOST, 1.1) if tree else None,
            ),
        ]
