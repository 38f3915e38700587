"""Puts a reward worker's process together: functions, streams, gRPC, metrics, and an orderly end."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from offbeat.config import Recipe
from offbeat.errors import ConfigError, OffbeatError, ServiceUnavailable
from offbeat.rpc import RpcServer, terminated
from offbeat.rpc.deadline import end_in_time, loop_turns
from offbeat.rpc.entry import run_folder, write_address
from offbeat.streams.redis import RedisWorkerStreams
from offbeat.telemetry.activity import Activity
from offbeat.telemetry.metrics import start_metrics
from offbeat.v1 import reward_pb2_grpc
from services.reward.calling import Scorer
from services.reward.counters import Counters
from services.reward.functions import load_functions
from services.reward.lane import Lane
from services.reward.service import SERVICE_NAME, RewardServicer
from services.reward.worker import Worker

log = logging.getLogger(__name__)

CALLS_GRACE_SECONDS = 2.0
LEAVE_SECONDS = 5.0
ANNOUNCE_SECONDS = 5.0

Result = TypeVar("Result")


async def serve(recipe: Recipe) -> None:
    """Runs a reward worker until SIGTERM. Raises `OffbeatError` when it can't start or can't go on."""
    stop = terminated()
    url = recipe.redis.url
    if url is None:
        raise ConfigError(
            "redis.url is not set; give the address of the run's Redis, e.g. --set redis.url=redis://HOST:6379/0"
        )
    worker_id = f"{socket.gethostname()}-{os.getpid()}"
    counters = Counters()
    servicer = RewardServicer(worker_id, counters)
    async with _listening(recipe, servicer, counters, worker_id) as server:
        scorer = await _load(recipe, counters, stop)
        if scorer is None:
            return
        servicer.scorer = scorer
        streams = RedisWorkerStreams(url, recipe.run_id, "reward", worker_id, recipe.redis)
        activity = Activity.open(run_folder(recipe), "reward", worker_id)

        functions = ",".join(scorer.names)

        async def announce() -> None:
            info = {"functions": functions, **counters.announced()}
            await streams.announce(server.address, info)

        async def tell(alive: bool) -> None:
            loop_turns(2 * recipe.reward.timeout_seconds)
            await server.health.set_alive(alive)
            with contextlib.suppress(TimeoutError, ServiceUnavailable):
                async with asyncio.timeout(ANNOUNCE_SECONDS):
                    await announce()

        worker = Worker(
            streams,
            scorer,
            recipe.reward,
            counters,
            worker_id=worker_id,
            beat_seconds=recipe.redis.beat_seconds,
            on_alive=tell,
            activity=activity,
        )
        draining = asyncio.create_task(_drain_on(stop, server, counters))
        try:
            if await _unless(stop, announce()):
                await server.health.set_ready(True)
                log.info("ready: %s", functions)
                await worker.run(stop)
        finally:
            end_in_time()
            draining.cancel()
            await server.health.set_ready(False)
            await _leave(streams)
            activity.close()
            await scorer.close()


@contextlib.asynccontextmanager
async def _listening(
    recipe: Recipe, servicer: RewardServicer, counters: Counters, worker_id: str
) -> AsyncIterator[RpcServer]:
    server = RpcServer(
        recipe.reward.rpc,
        SERVICE_NAME,
        lambda grpc_server: reward_pb2_grpc.add_RewardServiceServicer_to_server(
            servicer, grpc_server
        ),
    )
    registry = CollectorRegistry()
    registry.register(counters)
    await server.start()
    try:
        metrics_port = start_metrics(recipe.reward.rpc, registry)
        write_address(recipe, "reward", worker_id, server.address)
        log.info("listening on %s, metrics port %s", server.address, metrics_port)
        yield server
    finally:
        await server.stop(CALLS_GRACE_SECONDS)


async def _load(recipe: Recipe, counters: Counters, stop: asyncio.Event) -> Scorer | None:
    """The functions, made in a thread because a model may take minutes; None when told to stop meanwhile."""
    lane = Lane("load-reward-functions")
    functions = await _unless(
        stop, lane.call(lambda: load_functions(recipe.reward.functions), timeout_seconds=None)
    )
    lane.close()
    return Scorer(functions[0], recipe.reward.timeout_seconds, counters) if functions else None


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> tuple[Result] | None:
    """The result of `work`, in a tuple; None, and `work` is cancelled, when told to stop before it is done."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return (task.result(),)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None


async def _drain_on(stop: asyncio.Event, server: RpcServer, counters: Counters) -> None:
    await stop.wait()
    log.info("draining")
    counters.draining = True
    await server.health.set_ready(False)


async def _leave(streams: RedisWorkerStreams) -> None:
    with contextlib.suppress(TimeoutError, OffbeatError):
        async with asyncio.timeout(LEAVE_SECONDS):
            await streams.leave()
    await streams.close()
