"""Checkpoint services that mirror another one: chains, trees, and receivers that lose theirs."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from offbeat.errors import WeightsError
from offbeat.weights.client import CheckpointClient
from tests.harness.checkpoints import (
    RUN,
    SIZE,
    Running,
    base_of,
    client_of,
    content,
    policy,
    publish,
    serving,
    stage_and_check,
    until,
)
from tests.harness.proxy import Proxy


def relay_of(address: str, folder: Path, **settings: object):  # type: ignore[no-untyped-def]
    return serving(folder, upstream=CheckpointClient(address, RUN, folder.name), **settings)


def latest(service: Running) -> int:
    return service.servicer.counters.latest_version


async def test_a_chain_hands_on_what_it_gets(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "root") as root,
        relay_of(root.address, tmp_path / "first") as first,
        relay_of(first.address, tmp_path / "second") as second,
        client_of(root.address, "learner") as learner,
        client_of(second.address, deltas=True) as receiver,
    ):
        weights = policy(0)
        base = base_of(await publish(learner, weights, step=0), weights)
        await until(lambda: latest(second) == 1)
        await stage_and_check(receiver, tmp_path / "stage", 0)
        for step in (1, 2):
            weights = policy(step)
            base = base_of(await publish(learner, weights, step=step, base=base), weights)
            await until(lambda step=step: latest(second) == step + 1)
            await stage_and_check(receiver, tmp_path / "stage", step)
        assert receiver.counts.transfers == {"full": 1, "delta": 2}
        # Numbers and manifests are the root's, so a confirmation reaches it.
        manifest = await receiver.get_manifest()
        assert manifest == await learner.get_manifest()
        await receiver.applied(manifest, 0.0, 0.0)
        await until(lambda: root.servicer._receivers.get("receiver-1") == 3)
        assert (await receiver.status()).upstream == first.address


async def test_the_roots_egress_does_not_grow_with_the_receivers(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(serving(tmp_path / "root"))
        relay = await stack.enter_async_context(relay_of(root.address, tmp_path / "relay"))
        leaves = [
            await stack.enter_async_context(relay_of(relay.address, tmp_path / f"leaf{index}"))
            for index in range(2)
        ]
        learner = await stack.enter_async_context(client_of(root.address, "learner"))
        receivers = [
            await stack.enter_async_context(
                client_of(leaves[index % 2].address, f"r{index}", deltas=True)
            )
            for index in range(8)
        ]
        base = None
        for step in range(2):
            weights = policy(step)
            base = base_of(await publish(learner, weights, step=step, base=base), weights)
            await until(lambda step=step: all(latest(leaf) == step + 1 for leaf in leaves))
            await asyncio.gather(
                *(
                    stage_and_check(receiver, tmp_path / f"stage{index}", step)
                    for index, receiver in enumerate(receivers)
                )
            )
        assert root.servicer.counters.sent_bytes < 1.05 * SIZE
        assert root.servicer.counters.fetches == {"full": 1, "delta": 1}


async def test_a_receiver_that_loses_its_relay_goes_to_the_next_address(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "root") as root,
        relay_of(root.address, tmp_path / "relay") as relay,
        client_of(root.address, "learner") as learner,
        Proxy(relay.address) as proxy,
        client_of([proxy.address, root.address], deltas=True) as receiver,
    ):
        seen: list[int] = []

        async def watch() -> None:
            async for news in receiver.watch():
                seen.append(news.version)

        watching = asyncio.create_task(watch())
        base = base_of(await publish(learner, policy(0), step=0), policy(0))
        await until(lambda: seen == [1])
        await stage_and_check(receiver, tmp_path / "stage", 0, version=1)
        proxy.refuse = True
        proxy.cut()
        await publish(learner, policy(1), step=1, base=base)
        await until(lambda: seen == [1, 2])
        await stage_and_check(receiver, tmp_path / "stage", 1, version=2)
        assert receiver.address == root.address
        # What it held came from the relay, and is good as a base elsewhere.
        assert receiver.counts.transfers == {"full": 1, "delta": 1}
        watching.cancel()
        await asyncio.wait([watching])


async def test_a_relay_that_was_away_catches_up_with_the_newest_alone(tmp_path: Path) -> None:
    async with serving(tmp_path / "root", keep=5) as root, client_of(root.address) as learner:
        base = base_of(await publish(learner, policy(0), step=0), policy(0))
        async with relay_of(root.address, tmp_path / "relay") as relay:
            await until(lambda: latest(relay) == 1)
        for step in (1, 2, 3):
            base = base_of(await publish(learner, policy(step), step=step, base=base), policy(step))
        async with (
            relay_of(root.address, tmp_path / "relay") as relay,
            client_of(relay.address) as receiver,
        ):
            await until(lambda: latest(relay) == 4)
            assert [v.version for v in await receiver.list_versions()] == [1, 4]
            await stage_and_check(receiver, tmp_path / "stage", 3)
            # One in between is fetched when somebody wants it.
            await stage_and_check(receiver, tmp_path / "stage", 1, version=2)
            with pytest.raises(WeightsError, match="has no version 9"):
                await receiver.stage(tmp_path / "stage", version=9, deadline_seconds=60.0)
        assert root.servicer.counters.fetches == {"full": 1, "delta": 2}


async def test_a_relay_takes_no_publishes(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "root") as root,
        relay_of(root.address, tmp_path / "relay") as relay,
        client_of(relay.address) as learner,
    ):
        with pytest.raises(
            WeightsError, match=f"relay of the checkpoint service at {root.address}"
        ):
            await publish(learner, policy(0), step=0)
        with pytest.raises(WeightsError, match="publish there"):
            await learner.acquire_learner("learner")


async def test_a_damaged_base_at_a_relay_is_made_good(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "root") as root,
        client_of(root.address, "learner") as learner,
        relay_of(root.address, tmp_path / "relay") as relay,
        client_of(relay.address) as receiver,
    ):
        base = base_of(await publish(learner, policy(0), step=0), policy(0))
        await until(lambda: latest(relay) == 1 and relay.servicer._publisher._head.version == 1)
        relay.servicer._publisher._head.view[: len(b"spoilt")] = b"spoilt"
        await publish(learner, policy(1), step=1, base=base)
        await until(lambda: latest(relay) == 2)
        await stage_and_check(receiver, tmp_path / "stage", 1)
        assert content(policy(1)) == (tmp_path / "relay" / "2" / "weights.bin").read_bytes()
