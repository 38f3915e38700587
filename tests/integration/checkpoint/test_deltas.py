"""Weights that travel as deltas or mapped files: bit for bit right, and what broken ones lead to."""

import asyncio
import contextlib
from pathlib import Path

import grpc
import numpy as np
import pytest

from offbeat import rpc
from offbeat.errors import IntegrityError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights import delta
from offbeat.weights.client import CheckpointClient, PublishBase
from offbeat.weights.hashing import hash_of
from offbeat.weights.manifest import describe
from tests.harness.checkpoints import (
    MIB,
    RUN,
    SIZE,
    Running,
    Tensor,
    base_of,
    client_of,
    content,
    policy,
    publish,
    publish_steps,
    serving,
    stage_and_check,
    until,
)
from tests.harness.proxy import Proxy

# ---- deltas


async def test_deltas_go_up_and_down(
    service: Running, learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    await publish_steps(learner, 0, 0)
    await stage_and_check(receiver, tmp_path / "stage", 0)
    base = base_of(await publish(learner, policy(0), step=0), policy(0))
    for step in (1, 2, 3):
        response = await publish(learner, policy(step), step=step, base=base)
        base = base_of(response, policy(step))
        await stage_and_check(receiver, tmp_path / "stage", step)
    assert learner.counts.transfers == {"full": 2, "delta": 3}
    assert receiver.counts.transfers == {"full": 1, "delta": 3}
    assert not receiver.counts.fallbacks
    assert receiver.counts.bytes["delta"] < 3 * 0.02 * SIZE
    # What is stored is whole, and the same for who holds nothing.
    async with client_of(service.address) as fresh:
        for version in (2, 3, 4):
            await stage_and_check(fresh, tmp_path / "fresh", version - 1, version)
        assert fresh.counts.transfers == {"full": 3}
    assert service.servicer.counters.fetches == {"full": 4, "delta": 3}
    assert [path.name for path in (tmp_path / "stage").iterdir()] == ["4.weights"]


async def test_a_delta_over_several_versions_is_made_on_demand(
    learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    await publish_steps(learner, 0, 0)
    await stage_and_check(receiver, tmp_path / "stage", 0)
    await publish_steps(learner, 1, 2)
    await stage_and_check(receiver, tmp_path / "stage", 2)
    assert receiver.counts.transfers == {"full": 1, "delta": 1}
    # An older version may be wanted as well.
    await stage_and_check(receiver, tmp_path / "stage", 1, version=2)
    assert receiver.counts.transfers == {"full": 1, "delta": 2}


async def test_an_unknown_base_leads_to_a_full_fetch(
    service: Running, learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    await publish_steps(learner, 0, 0)
    await stage_and_check(receiver, tmp_path / "stage", 0)
    await publish_steps(
        learner, 1, 5
    )  # the first one, published in full, keeps nothing of version 1
    await stage_and_check(receiver, tmp_path / "stage", 5)
    assert receiver.counts.fallbacks == {"no_delta": 1}
    assert service.servicer.counters.deltas is not None
    assert service.servicer.counters.deltas.refusals == {"base_gone": 1}


async def test_a_base_that_the_service_lost_is_published_in_full(
    learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    old = base_of(await publish(learner, policy(0), step=0), policy(0))
    await publish_steps(learner, 1, 4)
    await publish(learner, policy(5), step=5, base=old)
    assert learner.counts.fallbacks == {"publish_not_found": 1}
    await stage_and_check(receiver, tmp_path / "stage", 5)


async def test_a_wrong_base_at_the_publisher_is_noticed(
    learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    response = await publish(learner, policy(0), step=0)
    wrong = PublishBase(response.manifest, [buffer for *_, buffer in policy(1)])
    await publish(learner, policy(2), step=2, base=wrong)
    assert learner.counts.fallbacks == {"publish_data_loss": 1}
    await stage_and_check(receiver, tmp_path / "stage", 2)
    # The service's copy in memory was spoilt, and is not used again.
    base = base_of(await publish(learner, policy(2), step=2), policy(2))
    await publish(learner, policy(3), step=3, base=base)
    await stage_and_check(receiver, tmp_path / "stage", 3)


async def test_a_spoilt_base_at_the_receiver_is_noticed(
    learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    await publish_steps(learner, 0, 0)
    await stage_and_check(receiver, tmp_path / "stage", 0)
    path = tmp_path / "stage" / "1.weights"
    with path.open("r+b") as file:
        file.seek(MIB)
        file.write(b"\x00\x01\x02\x03")
    await publish_steps(learner, 1, 1)
    await stage_and_check(receiver, tmp_path / "stage", 1)
    assert receiver.counts.fallbacks == {"damaged": 1}
    assert receiver.counts.transfers == {"full": 2, "delta": 1}


async def test_dense_changes_are_sent_whole(
    learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    old: list[Tensor] = [("t", "uint8", (MIB,), np.random.default_rng(0).bytes(MIB))]
    new: list[Tensor] = [("t", "uint8", (MIB,), np.random.default_rng(1).bytes(MIB))]
    base = base_of(await publish(learner, old, step=0), old)
    (await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)).discard()
    await publish(learner, new, step=1, base=base)
    staged = await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)
    assert staged.path.read_bytes() == new[0][3]
    assert learner.counts.transfers == receiver.counts.transfers == {"full": 2}


async def test_weights_in_use_are_not_changed(
    learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    await publish_steps(learner, 0, 0)
    used = await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)
    await publish_steps(learner, 1, 1)
    fetch = asyncio.create_task(receiver.stage(tmp_path / "stage", deadline_seconds=60.0))
    await until(lambda: receiver.counts.transfers["delta"])
    await asyncio.sleep(0.05)
    assert not fetch.done()
    assert used.path.read_bytes() == content(policy(0))
    used.discard()
    assert (await fetch).path.read_bytes() == content(policy(1))


async def test_a_full_fetch_can_be_asked_for(
    learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    await publish_steps(learner, 0, 1)
    for _ in range(2):
        await stage_and_check(receiver, tmp_path / "stage", 1, full=True)
    assert receiver.counts.transfers == {"full": 2}


async def test_a_service_without_deltas(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "store", deltas=False) as service,
        client_of(service.address, "learner") as learner,
        client_of(service.address, deltas=True) as receiver,
    ):
        await publish_steps(learner, 0, 1)
        assert learner.counts.fallbacks == {"publish_invalid_argument": 1}
        await stage_and_check(receiver, tmp_path / "stage", 1)


# ---- faults on the way


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("fault", ["cut", "flip"])
async def test_a_fault_at_any_place_of_a_delta(tmp_path: Path, fault: str, place: int) -> None:
    """The weights that were staged before stay as they are until the delta is whole."""
    async with (
        serving(tmp_path / "store") as service,
        client_of(service.address, "learner") as learner,
        Proxy(service.address) as proxy,
        client_of(proxy.address, deltas=True) as receiver,
    ):
        await publish_steps(learner, 0, 0)
        old = await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)
        old.discard()
        await publish_steps(learner, 1, 1)
        # About 100 kB of delta follow a header of less than 2 kB.
        position = (700, 3_000, 9_000, 20_000, 33_333, 48_000, 60_000, 76_000)[place]
        proxy.cut_after(position) if fault == "cut" else proxy.flip_at(position)
        await stage_and_check(receiver, tmp_path / "stage", 1)
        assert receiver.counts.transfers["full"] <= 2
        assert [path.name for path in (tmp_path / "stage").iterdir()] == ["2.weights"]


async def test_a_delta_goes_on_at_the_chunk_where_it_broke(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, 8 * MIB, np.uint8)
    new = old.copy()
    new[: 3 * MIB + MIB // 2] = rng.integers(0, 256, 3 * MIB + MIB // 2, np.uint8)
    first: list[Tensor] = [("t", "uint8", old.shape, old)]
    second: list[Tensor] = [("t", "uint8", old.shape, new)]
    async with (
        serving(tmp_path / "store") as service,
        client_of(service.address, "learner") as learner,
        Proxy(service.address) as proxy,
        client_of(proxy.address, deltas=True) as receiver,
    ):
        base = base_of(await publish(learner, first, step=0), first)
        (await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)).discard()
        await publish(learner, second, step=1, base=base)
        before = proxy.bytes["down"]
        proxy.cut_each_after(MIB + MIB // 2)
        staged = await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)
        assert staged.path.read_bytes() == content(second)
        assert receiver.counts.transfers == {"full": 1, "delta": 1}
        assert proxy.cuts >= 2
        size = receiver.counts.bytes["delta"]
        assert proxy.bytes["down"] - before < size + (proxy.cuts + 1) * (MIB + 64 * 1024)


async def test_a_damaged_chunk_is_sent_again_alone(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "store") as service,
        client_of(service.address, "learner") as learner,
        Proxy(service.address) as proxy,
        client_of(proxy.address) as receiver,
    ):
        await publish_steps(learner, 0, 0)
        proxy.flip_at(4 * MIB + 1000)
        await stage_and_check(receiver, tmp_path / "stage", 0)
        assert receiver.counts.damaged_chunks == 1
        assert proxy.bytes["down"] < SIZE + 4 * MIB


async def test_a_service_that_sends_chunks_in_disorder_is_not_believed(
    service: Running, learner: CheckpointClient, receiver: CheckpointClient, tmp_path: Path
) -> None:
    await publish_steps(learner, 0, 0)
    manifest = (await learner.get_manifest()).SerializeToString()
    sent: list[int] = []

    async def disordered(
        request: checkpoint.FetchRequest, context: grpc.aio.ServicerContext
    ) -> None:
        header = checkpoint.FetchHeader(manifest=checkpoint.Manifest.FromString(manifest))
        await context.write(checkpoint.FetchResponse(header=header))
        data = content(policy(0))
        for offset in (0, 2 * MIB, MIB):
            chunk = checkpoint.WeightsChunk(offset=offset, data=data[offset : offset + MIB])
            await context.write(checkpoint.FetchResponse(chunk=chunk))
            sent.append(offset)

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        disordered,
        request_deserializer=checkpoint.FetchRequest.FromString,
        response_serializer=checkpoint.FetchResponse.SerializeToString,
    )
    name = "offbeat.v1.CheckpointService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {"Fetch": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with client_of(f"127.0.0.1:{port}") as client:
        with pytest.raises(Exception, match="expected byte 1048576 next, found byte 2097152"):
            await client.stage(tmp_path / "stage", deadline_seconds=60.0)
    await server.stop(0)
    assert sent
    assert not list((tmp_path / "stage").iterdir())


async def test_generated_stubs_read_and_write_the_same_messages(
    service: Running, learner: CheckpointClient, tmp_path: Path
) -> None:
    weights = policy(0)
    manifest = describe(weights)
    manifest.run_id, manifest.term, manifest.kind = RUN, 1, checkpoint.WEIGHTS_KIND_FULL
    data = content(weights)
    requests = [checkpoint.PublishRequest(header=checkpoint.PublishHeader(manifest=manifest))]
    for offset in range(0, len(data), MIB):
        chunk = checkpoint.WeightsChunk(offset=offset, data=data[offset : offset + MIB])
        requests.append(checkpoint.PublishRequest(chunk=chunk))
    async with rpc.connect(service.address) as channel:
        stub = checkpoint_grpc.CheckpointServiceStub(channel)
        assert (await stub.Publish(iter(requests), timeout=60.0)).manifest.version == 1
        answers = [m async for m in stub.Fetch(checkpoint.FetchRequest(run_id=RUN), timeout=60.0)]
    assert answers[0].header.encoding == checkpoint.WEIGHTS_ENCODING_RAW
    assert b"".join(answer.chunk.data for answer in answers[1:]) == data


# ---- crashes


@pytest.mark.parametrize("lost", ["zeros", "missing base"])
async def test_a_version_whose_bytes_were_not_written_yet_is_made_again(
    tmp_path: Path, lost: str
) -> None:
    """What a crash between a delta's commit and the writing of its file leaves."""
    async with serving(tmp_path / "store") as service, client_of(service.address) as learner:
        await publish_steps(learner, 0, 1)
    path = tmp_path / "store" / "2" / "weights.bin"
    path.write_bytes(bytes(path.stat().st_size))
    if lost == "missing base":
        (tmp_path / "store" / "1" / "weights.bin").unlink()
    async with serving(tmp_path / "store") as service, client_of(service.address) as client:
        if lost == "zeros":
            await stage_and_check(client, tmp_path / "stage", 1)
        else:
            assert [v.available for v in await client.list_versions()] == [False, False]


# ---- one host


async def test_a_receiver_on_the_same_host_reads_the_services_file(
    service: Running, learner: CheckpointClient, tmp_path: Path
) -> None:
    async with client_of(service.address, deltas=True, same_host=True) as receiver:
        for step in range(3):
            await publish_steps(learner, step, step)
            await stage_and_check(receiver, tmp_path / "stage", step)
        assert receiver.counts.transfers == {"mapped": 3}
        assert service.servicer.counters.sent_bytes == 0
    assert not list((tmp_path / "stage").iterdir())


async def test_a_mapped_file_stays_while_it_is_used(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "store", keep=1) as service,
        client_of(service.address, "learner") as learner,
        client_of(service.address, same_host=True) as receiver,
    ):
        await publish_steps(learner, 0, 0)
        weights = await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)
        await publish_steps(learner, 1, 2)
        assert service.store.get(1).available
        assert weights.path.read_bytes() == content(policy(0))
        weights.discard()
        weights.discard()
        await until(lambda: not service.store.get(1).available)


async def test_a_mapped_file_outlives_the_service_and_does_not_hold_its_stop_up(
    tmp_path: Path,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(tmp_path / "store"))
        learner = await stack.enter_async_context(client_of(service.address, "learner"))
        receiver = await stack.enter_async_context(client_of(service.address, same_host=True))
        await publish_steps(learner, 0, 0)
        weights = await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)
        service.servicer.stop_watches()
        await service.server.stop(1000.0)
        (tmp_path / "store" / "1" / "weights.bin").unlink()
        assert weights.path.read_bytes() == content(policy(0))
        weights.discard()


async def test_a_receiver_that_sees_other_files_gets_the_bytes(
    service: Running, learner: CheckpointClient, tmp_path: Path
) -> None:
    await publish_steps(learner, 0, 0)
    async with client_of(service.address, same_host=True) as receiver:
        (await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)).discard()
        # As in a container with a folder of the same name and other files in it.
        (tmp_path / "store" / "nonce").write_bytes(b"another service's")
        await publish_steps(learner, 1, 1)
        await stage_and_check(receiver, tmp_path / "stage", 1)
        assert receiver.counts.transfers == {"mapped": 1, "full": 1}
        assert receiver.counts.fallbacks == {"not_this_host": 1}


async def test_a_damaged_file_is_not_read_in_place(
    service: Running, learner: CheckpointClient, tmp_path: Path
) -> None:
    await publish_steps(learner, 0, 1)
    path = tmp_path / "store" / "2" / "weights.bin"
    await until(lambda: path.read_bytes() == content(policy(1)))
    with path.open("r+b") as file:
        file.seek(MIB)
        file.write(b"\x00\x01\x02\x03")
    async with client_of(service.address, same_host=True) as receiver:
        with pytest.raises(IntegrityError, match="version 2 is damaged"):
            await receiver.stage(tmp_path / "stage", deadline_seconds=60.0)
        await stage_and_check(receiver, tmp_path / "stage", 0)  # the newest that is good
        assert receiver.counts.fallbacks == {"damaged": 1}
    assert service.store.damaged == 1


async def test_a_delta_that_is_refused_says_why(service: Running) -> None:
    manifest = describe(policy(1))
    manifest.run_id, manifest.term, manifest.kind = RUN, 1, checkpoint.WEIGHTS_KIND_FULL
    data = delta.MAGIC
    header = checkpoint.PublishHeader(
        manifest=manifest,
        encoding=checkpoint.WEIGHTS_ENCODING_DELTA,
        base_version=7,
        transfer_bytes=len(data),
        transfer_hash=hash_of(data),
    )
    requests = [checkpoint.PublishRequest(header=header)]
    async with rpc.connect(service.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="has no version 7") as caught:
            await checkpoint_grpc.CheckpointServiceStub(channel).Publish(
                iter(requests), timeout=60.0
            )
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
