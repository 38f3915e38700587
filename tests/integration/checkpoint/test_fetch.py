"""What the checkpoint service hands to receivers: whole, as it was, or not at all."""

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest

from offbeat import rpc
from offbeat.errors import IntegrityError, ServiceUnavailable, WeightsError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.chunks import NoRoom
from offbeat.weights.client import CheckpointClient, VersionGone
from tests.harness.checkpoints import (
    MIB,
    RUN,
    Running,
    Tensor,
    client_of,
    content,
    files_at_most,
    publish,
    serving,
    staged_bytes,
    tensors,
    until,
)
from tests.harness.proxy import Direction, Proxy
from tests.harness.service import Service

INVALID = grpc.StatusCode.INVALID_ARGUMENT


# ---- round trips


async def test_odd_tensors_come_back_as_they_were(client: CheckpointClient, tmp_path: Path) -> None:
    weights: list[Tensor] = [
        ("scalar", "float32", (), np.array(2.5, dtype=np.float32)),
        ("empty", "bfloat16", (0, 4), np.empty((0, 4), dtype=np.int16)),
        ("half", "float16", (3, 1, 2), np.arange(6, dtype=np.float16).reshape(3, 1, 2)),
        ("brain", "bfloat16", (5,), np.arange(5, dtype=np.uint16)),
        ("long", "int64", (2,), np.array([-1, 1], dtype=np.int64)),
        ("none", "float32", (0,), np.empty(0, dtype=np.float32)),
    ]
    response = await publish(client, weights, step=7)
    assert not response.existed
    staged = await client.stage(tmp_path / "stage", deadline_seconds=60.0)
    assert staged.path == tmp_path / "stage" / "1.weights"
    assert staged.path.read_bytes() == content(weights)
    manifest = staged.manifest
    assert manifest == response.manifest == await client.get_manifest()
    assert (manifest.run_id, manifest.version, manifest.term, manifest.step) == (RUN, 1, 1, 7)
    assert manifest.created_unix_ms > 0
    assert [list(spec.shape) for spec in manifest.tensors] == [list(w[2]) for w in weights]


async def test_only_empty_tensors(client: CheckpointClient, tmp_path: Path) -> None:
    await publish(client, [("e", "float32", (0,), np.empty(0, dtype=np.float32))])
    assert await staged_bytes(client, tmp_path / "stage") == b""


@pytest.mark.parametrize("nbytes", [MIB - 1, MIB, MIB + 1, 9 * MIB])
async def test_sizes_around_a_chunk(client: CheckpointClient, tmp_path: Path, nbytes: int) -> None:
    weights = tensors(nbytes)
    await publish(client, weights)
    assert await staged_bytes(client, tmp_path / "stage") == content(weights)


async def test_each_version_can_be_fetched(client: CheckpointClient, tmp_path: Path) -> None:
    several = [tensors(1000, seed) for seed in range(5)]
    for step, weights in enumerate(several):
        assert (await publish(client, weights, step=step)).manifest.version == step + 1
    assert await staged_bytes(client, tmp_path / "stage") == content(several[-1])
    assert await staged_bytes(client, tmp_path / "stage", 3) == content(several[2])
    assert (await client.get_manifest(1)).step == 0
    with pytest.raises(WeightsError, match="the bytes of version 1 are gone"):
        await client.stage(tmp_path / "stage", version=1, deadline_seconds=60.0)
    with pytest.raises(WeightsError, match="has no version 6"):
        await client.stage(tmp_path / "stage", version=6, deadline_seconds=60.0)
    listed = await client.list_versions()
    assert [(v.version, v.available) for v in listed] == [
        (1, False), (2, False), (3, True), (4, True), (5, True),
    ]  # fmt: skip


async def test_no_version_yet(client: CheckpointClient, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has no version yet; publish one first"):
        await client.stage(tmp_path, deadline_seconds=60.0)
    with pytest.raises(WeightsError, match="no version yet"):
        await client.get_manifest()
    assert await client.list_versions() == []


async def test_a_fetch_beyond_the_end_is_refused(
    service: Running, client: CheckpointClient
) -> None:
    await publish(client, tensors(99))
    async with rpc.connect(service.address) as channel:
        stub = checkpoint_grpc.CheckpointServiceStub(channel)
        request = checkpoint.FetchRequest(run_id=RUN, offset=100)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Fetch(request, timeout=60.0).read()
    assert caught.value.code() == INVALID


# ---- broken connections


@pytest.mark.parametrize("cut_bytes", [MIB + MIB // 2, 2 * MIB + 4321])
async def test_a_fetch_goes_on_where_it_broke(
    service: Running, client: CheckpointClient, tmp_path: Path, cut_bytes: int
) -> None:
    weights = tensors(6 * MIB + 1234)
    await publish(client, weights)
    async with Proxy(service.address) as proxy, client_of(proxy.address) as far:
        proxy.cut_each_after(cut_bytes)
        assert await staged_bytes(far, tmp_path / "stage") == content(weights)
        assert proxy.cuts >= 2
        # No cut costs more than the chunk that it broke, with framing and manifest.
        assert proxy.bytes["down"] <= len(content(weights)) + (proxy.cuts + 1) * (MIB + 64 * 1024)


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_byte_that_changed_on_the_way_is_sent_again(
    service: Running, client: CheckpointClient, tmp_path: Path, direction: Direction
) -> None:
    weights = tensors(3 * MIB)
    async with Proxy(service.address) as proxy, client_of(proxy.address) as far:
        if direction == "up":
            proxy.flip_at(MIB + 5000, "up")
        await publish(far, weights)
        if direction == "down":
            proxy.flip_at(MIB + 5000, "down")
        assert await staged_bytes(far, tmp_path / "stage") == content(weights)
        assert proxy.bytes[direction] > 4 * MIB
    assert [v.version for v in await client.list_versions()] == [1]


async def test_a_cancelled_transfer_leaves_nothing(
    service: Running, client: CheckpointClient, tmp_path: Path
) -> None:
    async with Proxy(service.address) as proxy, client_of(proxy.address) as far:
        upload = asyncio.create_task(publish(far, tensors(20 * MIB)))
        await until(lambda: service.servicer.counters.received_bytes > 9 * MIB)
        upload.cancel()
        await until(lambda: not list((tmp_path / "store" / "incoming").iterdir()))
        await publish(client, tensors(20 * MIB))
        fetch = asyncio.create_task(staged_bytes(far, tmp_path / "stage"))
        await until(lambda: proxy.bytes["down"] > 9 * MIB)
        fetch.cancel()
        await asyncio.wait([upload, fetch])
        assert not list((tmp_path / "stage").iterdir())
        await until(lambda: service.store.get(1).leases == 0)
    assert [v.version for v in await client.list_versions()] == [1]


async def test_nobody_there(tmp_path: Path) -> None:
    async with Proxy("127.0.0.1:1") as proxy, client_of(proxy.address) as client:
        proxy.refuse = True
        for call in (
            publish(client, tensors(99), deadline_seconds=0.2),
            client.stage(tmp_path / "stage", deadline_seconds=0.2),
            client.status(deadline_seconds=0.2),
        ):
            with pytest.raises(
                ServiceUnavailable, match=f"{proxy.address} did not .* within 0.2 s"
            ):
                await call
    assert not list((tmp_path / "stage").iterdir())


async def test_a_fetch_outlives_kills_of_the_service(process: Service, tmp_path: Path) -> None:
    weights = tensors(24 * MIB)
    process.start()
    async with client_of(await process.ready()) as client:
        await publish(client, weights)
    async with Proxy(await process.ready()) as proxy, client_of(proxy.address) as far:
        proxy.stall()
        fetch = asyncio.create_task(staged_bytes(far, tmp_path / "stage"))
        await until(lambda: proxy.connections)
        proxy.delay_seconds = 0.001
        proxy.resume()
        await until(lambda: proxy.bytes["down"] > 12 * MIB)
        process.kill()
        proxy.delay_seconds = 0.0
        process.start()
        proxy.target = await process.ready()
        assert await fetch == content(weights)
        # From the beginning it would be 36; what was in the sockets when they broke is sent twice.
        assert proxy.bytes["down"] < 34 * MIB
    assert process.stop() == 0


# ---- leases and retention


async def test_an_open_fetch_keeps_its_version(tmp_path: Path) -> None:
    weights = tensors(20 * MIB)
    async with (
        serving(tmp_path / "store", keep=1) as service,
        client_of(service.address) as client,
        Proxy(service.address) as proxy,
        client_of(proxy.address) as far,
    ):
        await publish(client, weights, step=1)
        fetch = asyncio.create_task(staged_bytes(far, tmp_path / "stage"))
        await until(lambda: proxy.bytes["down"] > MIB)
        proxy.stall()
        for step in (2, 3):
            await publish(client, tensors(99, step), step=step)
        await until(lambda: not service.store.get(2).available)
        listed = {v.version: (v.available, v.leases) for v in await client.list_versions()}
        assert listed == {1: (True, 1), 2: (False, 0), 3: (True, 0)}
        proxy.resume()
        assert await fetch == content(weights)
        await until(lambda: not service.store.get(1).available)


async def test_a_broken_fetch_of_the_newest_goes_on_to_the_newer(tmp_path: Path) -> None:
    newest = tensors(99, 3)
    async with (
        serving(tmp_path / "store", keep=1) as service,
        client_of(service.address) as client,
        Proxy(service.address) as proxy,
        client_of(proxy.address) as far,
    ):
        await publish(client, tensors(20 * MIB), step=1)
        of_newest, of_first = (
            asyncio.create_task(staged_bytes(far, tmp_path / f"stage-{version}", version))
            for version in (0, 1)
        )
        await until(lambda: service.store.get(1).leases == 2)
        proxy.stall()
        await publish(client, newest, step=2)
        proxy.refuse = True
        proxy.cut()
        proxy.resume()
        await until(lambda: not service.store.get(1).available)
        proxy.refuse = False
        assert await of_newest == content(newest)
        with pytest.raises(VersionGone, match="the bytes of version 1 are gone"):
            await of_first
        assert not list((tmp_path / "stage-1").iterdir())


async def test_a_lease_ends(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "store", keep=1, lease_seconds=0.2) as service,
        client_of(service.address) as client,
        rpc.connect(service.address) as channel,
    ):
        await publish(client, tensors(40 * MIB), step=1)
        stub = checkpoint_grpc.CheckpointServiceStub(channel)
        stuck = stub.Fetch(checkpoint.FetchRequest(run_id=RUN), timeout=60.0)
        assert (await anext(aiter(stuck))).header.manifest.version == 1
        await publish(client, tensors(99), step=2)
        await until(lambda: not service.store.get(1).available)
        with pytest.raises(grpc.aio.AioRpcError, match=r"checkpoint\.lease_seconds") as caught:
            [message async for message in stuck]
        assert caught.value.code() == grpc.StatusCode.ABORTED


# ---- damage and full disks


@pytest.mark.parametrize("damage", ["bit", "page", "short"])
async def test_damaged_weights_are_never_staged(
    service: Running, client: CheckpointClient, tmp_path: Path, damage: str
) -> None:
    await publish(client, tensors(2 * MIB, 1), step=1)
    await publish(client, tensors(2 * MIB, 2), step=2)
    path = tmp_path / "store" / "2" / "weights.bin"
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[MIB] ^= 1
    elif damage == "page":
        data[MIB : MIB + 4096] = bytes(4096)
    else:
        del data[MIB:]
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="version 2"):
        await client.stage(tmp_path / "stage", deadline_seconds=60.0)
    assert not list((tmp_path / "stage").iterdir())
    listed = {v.version: v.available for v in await client.list_versions()}
    assert listed == {1: True, 2: False}
    assert service.store.damaged == 1
    assert await staged_bytes(client, tmp_path / "stage") == content(tensors(2 * MIB, 1))
    again = await publish(client, tensors(2 * MIB, 2), step=2)
    assert (again.existed, again.manifest.version) == (False, 3)


async def test_a_receiver_without_room_says_so_at_once(
    client: CheckpointClient, tmp_path: Path
) -> None:
    await publish(client, tensors(2 * MIB))
    with files_at_most(MIB), pytest.raises(NoRoom, match=str(tmp_path / "stage")):
        await client.stage(tmp_path / "stage", deadline_seconds=60.0)
    assert not list((tmp_path / "stage").iterdir())
