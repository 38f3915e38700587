"""A checkpoint service in the test's own process, and random weights to publish to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offbeat import rpc
from offbeat.config.service import RpcSettings
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.client import CheckpointClient, PublishBase
from offbeat.weights.manifest import as_bytes, describe
from services.checkpoint.service import SERVICE_NAME, CheckpointServicer, VersionMark, add_to_server
from services.checkpoint.store import VersionStore

RUN = "run-1"
MIB = 1024**2


@dataclass
class Running:
    """A service in this process, on a port of its own."""

    server: rpc.RpcServer
    servicer: CheckpointServicer
    store: VersionStore

    @property
    def address(self) -> str:
        return self.server.address


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    keep: int = 3,
    lease_seconds: float = 600.0,
    mark: VersionMark | None = None,
    load: bool = True,
    **settings: Any,
) -> AsyncIterator[Running]:
    store = VersionStore(folder, RUN, keep)
    servicer = CheckpointServicer(store, lease_seconds=lease_seconds, mark=mark, **settings)
    server = rpc.RpcServer(
        RpcSettings(),
        SERVICE_NAME,
        lambda server: add_to_server(servicer, server),
    )
    await server.start()
    try:
        if load:
            await servicer.load()
            await server.health.set_ready(True)
        yield Running(server, servicer, store)
    finally:
        servicer.stop_watches()
        await server.stop(0)
        await servicer.close()


@contextlib.asynccontextmanager
async def client_of(
    address: str | list[str], name: str = "receiver-1", **settings: bool
) -> AsyncIterator[CheckpointClient]:
    client = CheckpointClient(address, RUN, name, **settings)
    try:
        yield client
    finally:
        await client.close()


Tensor = tuple[str, str, Sequence[int], np.ndarray]


def tensors(nbytes: int, seed: int = 0) -> list[Tensor]:
    """Three tensors of random bytes whose borders lie on no chunk's border."""
    rng = np.random.default_rng(seed)
    sizes = [nbytes // 3 - 7, 5, nbytes - nbytes // 3 + 2]
    return [
        (f"t{index}", "uint8", (size,), rng.integers(0, 256, size, dtype=np.uint8))
        for index, size in enumerate(sizes)
    ]


def content(weights: list[Tensor]) -> bytes:
    return b"".join(as_bytes(buffer) for *_, buffer in weights)


async def publish(
    client: CheckpointClient,
    weights: list[Tensor],
    *,
    term: int = 1,
    step: int = 1,
    base: PublishBase | None = None,
    deadline_seconds: float = 60.0,
) -> checkpoint.PublishResponse:
    manifest = describe(weights)
    manifest.term, manifest.step, manifest.kind = term, step, checkpoint.WEIGHTS_KIND_FULL
    buffers = [buffer for *_, buffer in weights]
    return await client.publish(manifest, buffers, base=base, deadline_seconds=deadline_seconds)


async def until(condition: Callable[[], Any]) -> None:
    """Waits for `condition()`; the test's own time limit ends a wait in vain."""
    while not condition():
        await asyncio.sleep(0.005)
