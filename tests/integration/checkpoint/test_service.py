"""The checkpoint service as a service: watches, confirmations, health, reflection, metrics, a graceful stop."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from prometheus_client import CollectorRegistry

from offbeat import rpc
from offbeat.errors import Fenced, IntegrityError, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.client import CheckpointClient
from services.checkpoint.service import (
    SERVICE_NAME,
)
from tests.harness.checkpoints import (
    RUN,
    Running,
    client_of,
    publish,
    publish_chunk,
    publish_header,
    refusal,
    serving,
    tensors,
    until,
)
from tests.harness.proxy import Proxy
from tests.harness.service import Service, health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# ---- receivers and runs


async def test_confirmed_versions_show(client: CheckpointClient, service: Running) -> None:
    for step in range(2):
        await publish(client, tensors(999, step), step=step)
    first, second = await client.get_manifest(1), await client.get_manifest(2)
    async with client_of(service.address, "receiver-2") as other:
        await client.applied(first, 1e-5, 0.1)
        await other.applied(first, 1e-5, 0.1)
        await other.applied(second, 1e-5, 0.1)
    listed = await client.list_versions()
    assert [list(v.receivers) for v in listed] == [["receiver-1"], ["receiver-2"]]
    status = await client.status()
    assert dict(status.receivers) == {"receiver-1": 1, "receiver-2": 2}
    assert (status.run_id, status.latest_version, status.available_versions) == (RUN, 2, 2)
    assert status.stored_bytes == status.received_bytes == 2 * 999
    first.digest = second.digest
    with pytest.raises(IntegrityError, match="another manifest of version 1"):
        await client.applied(first, 0.0, 0.0)


async def test_another_run_is_refused(service: Running, tmp_path: Path) -> None:
    stranger = CheckpointClient(service.address, "run-2", "receiver-1")
    calls = [
        publish(stranger, tensors(99)),
        stranger.acquire_learner("learner"),
        stranger.stage(tmp_path, deadline_seconds=60.0),
        stranger.list_versions(),
        anext(stranger.watch()),
    ]
    for call in calls:
        with pytest.raises(WeightsError, match="keeps the weights of run 'run-1', not of 'run-2'"):
            await call
    await stranger.close()


# ---- watching


async def test_watchers_see_each_newest_version_once(
    client: CheckpointClient, service: Running
) -> None:
    await publish(client, tensors(99, 1), step=1)
    seen: dict[int, list[int]] = {0: [], 1: [], 7: []}

    async def watch(after: int) -> None:
        async with client_of(service.address) as watcher:
            async for news in watcher.watch(after):
                seen[after].append(news.version)

    watchers = [asyncio.create_task(watch(after)) for after in seen]
    await until(lambda: seen[0] == [1])
    for step in range(2, 9):
        await publish(client, tensors(99, step), step=step)
        await until(lambda step=step: seen[0][-1] == step)
    await until(lambda: seen[1][-1:] == seen[7][-1:] == [8])
    for watcher in watchers:
        watcher.cancel()
    await asyncio.wait(watchers)
    assert seen[0] == list(range(1, 9))
    assert seen[1][0] >= 2
    assert seen[7] == [8]


async def test_a_watch_outlives_the_service(tmp_path: Path) -> None:
    async with Proxy("127.0.0.1:1") as proxy, client_of(proxy.address) as watcher:
        seen: list[int] = []

        async def watch() -> None:
            async for news in watcher.watch():
                seen.append(news.version)

        task = asyncio.create_task(watch())
        for step in range(1, 4):
            async with serving(tmp_path / "store") as service, client_of(service.address) as client:
                proxy.target = service.address
                await publish(client, tensors(99, step), step=step)
                await until(lambda step=step: seen == list(range(1, step + 1)))
        task.cancel()
        await asyncio.wait([task])


# ---- health, reflection, metrics, the end


async def test_ready_only_once_the_versions_are_loaded(tmp_path: Path) -> None:
    async with serving(tmp_path / "store", load=False) as service:
        names = ["", "readiness", SERVICE_NAME, "liveness"]
        states = [await health(service.address, name) for name in names]
        assert states == [NOT_SERVING, NOT_SERVING, NOT_SERVING, SERVING]
        code, text = await refusal(service, [publish_header()])
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "still loading" in text
        await service.servicer.load()
        await service.server.health.set_ready(True)
        assert [await health(service.address, name) for name in names] == [SERVING] * 4


async def test_reflection_lists_the_service(service: Running) -> None:
    def described() -> tuple[set[str], set[str]]:
        with grpc.insecure_channel(service.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol(SERVICE_NAME)
            return set(database.get_services()), {m.name for m in file.service[0].method}

    services, methods = await asyncio.to_thread(described)
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= services
    assert {"Publish", "Fetch", "Watch", "AcquireLearner"} <= methods


async def test_metrics_count_what_happened(client: CheckpointClient, service: Running) -> None:
    registry = CollectorRegistry()
    registry.register(service.servicer.counters)
    await client.acquire_learner("learner", term_floor=2)
    await publish(client, tensors(500), term=3)
    with pytest.raises(Fenced):
        await publish(client, tensors(501), term=2)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"offbeat_checkpoint_{name}", labels)

    assert value("term") == 3
    assert value("latest_version") == value("published_total") == value("available_versions") == 1
    assert value("stored_bytes") == value("received_bytes_total") == 500
    assert value("refusals_total", status="FAILED_PRECONDITION") == 1
    assert value("damaged_total") == value("fetches") == 0


async def test_a_graceful_stop_lets_a_publish_end_and_ends_watches(
    process: Service, tmp_path: Path
) -> None:
    process.start()
    address = await process.ready()
    stopping = asyncio.Event()

    async def requests() -> AsyncIterator[checkpoint.PublishRequest]:
        yield publish_header()
        yield publish_chunk(0, b"ab")
        await stopping.wait()
        yield publish_chunk(2, b"cd")

    async with client_of(address) as client, rpc.connect(address) as channel:
        await publish(client, tensors(99), term=1)
        watch = client.watch()
        assert (await anext(watch)).version == 1
        upload = checkpoint_grpc.CheckpointServiceStub(channel).Publish(requests(), timeout=60.0)
        await until(lambda: list((tmp_path / "store" / "incoming").iterdir()))
        stopped = asyncio.create_task(asyncio.to_thread(process.stop))
        while await health(address) == SERVING:
            await asyncio.sleep(0.01)
        stopping.set()
        assert (await upload).manifest.version == 2
        assert await stopped == 0
        await watch.aclose()
