"""Asks every process of a run how it is. Used by `offbeat status`."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from offbeat.config import Recipe, load_recipe
from offbeat.errors import OffbeatError
from offbeat.local.addresses import REDIS, Address, newest_address, read_addresses
from offbeat.local.folder import RECIPE_FILE, is_locked
from offbeat.rpc import connect
from offbeat.streams.base import Backlog, Member
from offbeat.streams.redis import RedisLearnerStreams
from offbeat.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    learner_pb2,
    learner_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
)

ANSWER_SECONDS = 2.0

ASK: dict[str, tuple[Callable[[grpc.aio.Channel], Any], Callable[[], Any]]] = {
    "checkpoint": (
        checkpoint_pb2_grpc.CheckpointServiceStub,
        checkpoint_pb2.CheckpointServiceGetStatusRequest,
    ),
    "generator": (
        generator_pb2_grpc.GeneratorServiceStub,
        generator_pb2.GeneratorServiceGetStatusRequest,
    ),
    "learner": (learner_pb2_grpc.LearnerServiceStub, learner_pb2.LearnerServiceGetStatusRequest),
    "reward": (reward_pb2_grpc.RewardServiceStub, reward_pb2.RewardServiceGetStatusRequest),
}


@dataclass(frozen=True)
class MemberStatus:
    """One process: its GetStatus answer as a dictionary, or why there is none."""

    service: str
    member_id: str
    address: str
    status: dict[str, Any] | None = None
    error: str = ""
    seconds_since_beat: float | None = None
    """Of a worker, by Redis's clock; None for one whose last heartbeat is too old for it to count as alive."""
    held: int = 0
    """Entries of the streams that a worker holds."""

    @property
    def groups_per_minute(self) -> float | None:
        """Of a worker, since its start; None where it does not tell."""
        answer = self.status or {}
        up = float(answer.get("uptime_seconds", 0.0))
        if up <= 0 or "groups_finished" not in answer:
            return None
        return 60 * int(answer["groups_finished"]) / up


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment."""

    run_id: str
    folder: str
    running: bool
    members: list[MemberStatus] = field(default_factory=list)
    streams: list[Backlog] = field(default_factory=list)
    workers: list[Member] = field(default_factory=list)
    redis_error: str = ""


async def run_status(folder: Path) -> RunStatus:
    """Asks all processes at once; one that does not answer within 2 s is reported as such.

    Processes are those that left an address in the folder, and workers elsewhere that announced themselves in Redis.
    """
    recipe = load_recipe(folder / RECIPE_FILE)
    streams, workers, redis_error = await _look_at_redis(recipe, folder)
    addresses = [found for found in read_addresses(folder / "addresses") if found.service in ASK]
    known = {found.address for found in addresses}
    addresses += [
        Address(worker.role, worker.member_id, worker.address)
        for worker in workers
        if worker.address and worker.address not in known
    ]
    members = await asyncio.gather(*(_ask(address) for address in addresses))
    beats = {worker.address: worker for worker in workers}
    return RunStatus(
        run_id=recipe.run_id,
        folder=str(folder),
        running=is_locked(folder),
        members=[_with_beat(member, beats.get(member.address)) for member in members],
        streams=streams,
        workers=workers,
        redis_error=redis_error,
    )


def _with_beat(member: MemberStatus, worker: Member | None) -> MemberStatus:
    if worker is None:
        return member
    return replace(member, seconds_since_beat=worker.seconds_since_beat, held=worker.pending)


async def _look_at_redis(recipe: Recipe, folder: Path) -> tuple[list[Backlog], list[Member], str]:
    """Streams and workers, or why they can't be known."""
    url = recipe.redis.url or newest_address(folder / "addresses", REDIS)
    if url is None:
        return [], [], "no server is known yet"
    settings = recipe.redis.model_copy(update={"outage_seconds": ANSWER_SECONDS})
    streams = RedisLearnerStreams(url, recipe.run_id, "status", settings)
    try:
        return await streams.backlog(), await streams.members(), ""
    except OffbeatError as error:
        return [], [], str(error)
    finally:
        await streams.close()


async def _ask(address: Address) -> MemberStatus:
    stub_of, request = ASK[address.service]
    async with connect(address.address) as channel:
        get_status: Callable[..., Awaitable[Any]] = stub_of(channel).GetStatus
        try:
            answer = await get_status(request(), timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            return MemberStatus(
                address.service, address.member_id, address.address, error=error.code().name
            )
    status = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return MemberStatus(address.service, address.member_id, address.address, status)
