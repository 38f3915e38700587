"""A checkpoint service in the test's own process or in one of its own, what is published to it, and its clients."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import yaml

from offbeat import rpc
from offbeat.config.service import RpcSettings
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.client import CheckpointClient, PublishBase
from offbeat.weights.manifest import as_bytes, describe
from services.checkpoint.service import SERVICE_NAME, CheckpointServicer, VersionMark, add_to_server
from services.checkpoint.store import VersionStore
from tests.harness.service import Service

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
    port: int = 0,
    **settings: Any,
) -> AsyncIterator[Running]:
    store = VersionStore(folder, RUN, keep)
    servicer = CheckpointServicer(store, lease_seconds=lease_seconds, mark=mark, **settings)
    server = rpc.RpcServer(
        RpcSettings(bind=f"127.0.0.1:{port}"),
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


# ---- weights that change little by little


SIZE = 6 * MIB
"""Bytes of `policy`, about."""


def policy(step: int, *, size: int = SIZE) -> list[Tensor]:
    """Weights in bfloat16, of which each step changes 1 %, and which have a scalar and an empty tensor."""
    rng = np.random.default_rng(0)
    large = rng.integers(0, 2**16, size // 2, np.uint16)
    for number in range(step):
        places = np.random.default_rng(number + 1).random(len(large)) < 0.01
        large[places] += 1
    return [
        ("empty", "bfloat16", (0, 2), np.empty(0, np.uint16)),
        ("large", "bfloat16", (len(large),), large),
        ("scalar", "float32", (), np.array(step, np.float32)),
    ]


def base_of(response: checkpoint.PublishResponse, weights: list[Tensor]) -> PublishBase:
    return PublishBase(response.manifest, [buffer for *_, buffer in weights])


async def publish_steps(client: CheckpointClient, first: int, last: int) -> None:
    """Publishes steps, each but the first as a delta to the one before."""
    base = None
    for step in range(first, last + 1):
        weights = policy(step)
        base = base_of(await publish(client, weights, step=step, base=base), weights)


async def stage_and_check(
    client: CheckpointClient, folder: Path, step: int, version: int = 0, **how: bool
) -> None:
    weights = await client.stage(folder, version=version, deadline_seconds=60.0, **how)
    assert weights.manifest.step == step
    assert weights.path.read_bytes() == content(policy(step))
    weights.discard()


# ---- requests by hand, and what the service makes of them


ABCD = [("t", "uint8", (4,), b"abcd")]


def publish_header(weights: Sequence[tuple] = ABCD, **fields: object) -> checkpoint.PublishRequest:
    manifest = describe(weights)
    manifest.run_id, manifest.term, manifest.kind = RUN, 1, checkpoint.WEIGHTS_KIND_FULL
    header = checkpoint.PublishHeader(manifest=manifest)
    for name, value in fields.items():
        target = header if name in header.DESCRIPTOR.fields_by_name else header.manifest
        setattr(target, name, value)
    return checkpoint.PublishRequest(header=header)


def publish_chunk(offset: int, data: bytes) -> checkpoint.PublishRequest:
    return checkpoint.PublishRequest(chunk=checkpoint.WeightsChunk(offset=offset, data=data))


async def refusal(
    service: Running, requests: Sequence[checkpoint.PublishRequest]
) -> tuple[grpc.StatusCode, str]:
    """What the service answers to a publish that it does not take."""
    async with rpc.connect(service.address) as channel:
        stub = checkpoint_grpc.CheckpointServiceStub(channel)
        try:
            await stub.Publish(iter(requests), timeout=60.0)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    raise AssertionError("the service took the publish")


async def staged_bytes(client: CheckpointClient, folder: Path, version: int = 0) -> bytes:
    weights = await client.stage(folder, version=version, deadline_seconds=60.0)
    assert list(folder.iterdir()) == [weights.path]
    data = weights.path.read_bytes()
    weights.discard()
    return data


# ---- processes and disks


def a_process(tmp_path: Path, **environment: str) -> Service:
    recipe = tmp_path / "recipe.yaml"
    tree = {
        "run": {"id": RUN, "directory": str(tmp_path / "runs")},
        "model": {"path": "/no/model"},
        "data": {"train": {"kind": "jsonl", "path": "no.jsonl"}},
        "sampling": {"max_tokens": 8},
        "schedule": {"steps": 1, "prompts_per_step": 1},
        "learner": {"loss": {"name": "online_dpo"}},
        "reward": {"functions": [{"name": "length"}]},
        "checkpoint": {"directory": str(tmp_path / "store")},
    }
    recipe.write_text(yaml.safe_dump(tree))
    folder = tmp_path / "runs" / RUN
    return Service("checkpoint", recipe, folder, environment=environment)


@contextlib.contextmanager
def files_at_most(nbytes: int) -> Iterator[None]:
    """What a full disk is to writers: no file of this process may grow beyond `nbytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
