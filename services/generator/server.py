"""Puts a generator's process together: engine, weights, streams, gRPC, metrics, and an orderly end."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry

from offbeat.config import Recipe
from offbeat.errors import ConfigError, OffbeatError
from offbeat.rpc import RpcServer, terminated
from offbeat.rpc.deadline import end_in_time, loop_turns
from offbeat.rpc.entry import run_folder, write_address
from offbeat.streams.redis import RedisWorkerStreams
from offbeat.telemetry.activity import Activity
from offbeat.telemetry.metrics import start_metrics
from offbeat.v1 import generator_pb2_grpc
from offbeat.weights.client import CheckpointClient
from services.generator.counters import Counters
from services.generator.engines import Engine, create_engine
from services.generator.engines.model_folder import read_config
from services.generator.held import Identity
from services.generator.prompts import PromptEncoder
from services.generator.service import SERVICE_NAME, GeneratorServicer
from services.generator.staging import Stager, StagingFolders
from services.generator.updates import Updater
from services.generator.worker import Worker

log = logging.getLogger(__name__)

CALLS_GRACE_SECONDS = 2.0
LEAVE_SECONDS = 5.0


async def serve(recipe: Recipe) -> None:
    """Runs a generator until SIGTERM. Raises `OffbeatError` when it can't start or can't go on."""
    stop = terminated()
    redis_url, checkpoint_address = _addresses(recipe)
    vocab_size = read_config(recipe.model.path).get("vocab_size")
    generator_id = f"{socket.gethostname()}-{os.getpid()}"
    settings = recipe.generator
    engine = create_engine(settings.engine, recipe.model, threads=settings.threads)
    activity = Activity.open(run_folder(recipe), "generator", generator_id)
    counters = Counters()
    servicer = GeneratorServicer(
        engine,
        PromptEncoder(recipe.model.path),
        recipe.sampling,
        counters,
        generator_id=generator_id,
        engine_name=settings.engine.name,
        vocab_size=vocab_size,
    )
    async with _listening(recipe, servicer, counters, generator_id) as server:
        if not await _started(engine, stop):
            return
        identity = Identity(
            recipe.run_id, generator_id, server.address, settings.engine.name, vocab_size
        )
        folders = StagingFolders(settings.staging_directory, run_folder(recipe))
        client = CheckpointClient(
            [*settings.checkpoint_addresses, checkpoint_address],
            recipe.run_id,
            generator_id,
            deltas=recipe.checkpoint.deltas,
            # An adapter is small, and merged into a file of its own beside what was fetched.
            same_host=recipe.checkpoint.same_host_files and recipe.learner.lora is None,
        )
        streams = RedisWorkerStreams(
            redis_url, recipe.run_id, "generator", generator_id, recipe.redis
        )
        try:
            worker = _worker(
                recipe, engine, client, streams, folders, counters, server, identity, activity
            )
            servicer.worker = worker
            await _run(worker, stop)
        finally:
            end_in_time()
            await server.health.set_ready(False)
            await _leave(streams)
            await client.close()
            folders.remove()
            activity.close()
            await engine.stop()


def _addresses(recipe: Recipe) -> tuple[str, str]:
    """Redis and checkpoint service. Raises `ConfigError` when the recipe does not name one."""
    if recipe.redis.url is None:
        raise ConfigError(
            "redis.url is not set; give the address of the run's Redis, e.g. --set redis.url=redis://HOST:6379/0"
        )
    if recipe.checkpoint.address is None:
        raise ConfigError(
            "checkpoint.address is not set; give HOST:PORT of the run's checkpoint service, "
            "e.g. --set checkpoint.address=HOST:50051"
        )
    return recipe.redis.url, recipe.checkpoint.address


@contextlib.asynccontextmanager
async def _listening(
    recipe: Recipe, servicer: GeneratorServicer, counters: Counters, generator_id: str
) -> AsyncIterator[RpcServer]:
    server = RpcServer(
        recipe.generator.rpc,
        SERVICE_NAME,
        lambda grpc_server: generator_pb2_grpc.add_GeneratorServiceServicer_to_server(
            servicer, grpc_server
        ),
    )
    registry = CollectorRegistry()
    registry.register(counters)
    await server.start()
    try:
        metrics_port = start_metrics(recipe.generator.rpc, registry)
        write_address(recipe, "generator", generator_id, server.address)
        log.info("listening on %s, metrics port %s", server.address, metrics_port)
        yield server
    finally:
        await server.stop(CALLS_GRACE_SECONDS)


async def _started(engine: Engine, stop: asyncio.Event) -> bool:
    """Starts the engine; False when told to stop meanwhile."""
    starting = asyncio.create_task(engine.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        # An engine can't be interrupted while it starts; what it began ends with the process.
        log.info("told to stop while the engine was starting")
        starting.cancel()
        return False
    await starting
    log.info("engine ready; waiting for the first version")
    return True


def _worker(
    recipe: Recipe,
    engine: Engine,
    client: CheckpointClient,
    streams: RedisWorkerStreams,
    folders: StagingFolders,
    counters: Counters,
    server: RpcServer,
    identity: Identity,
    activity: Activity,
) -> Worker:
    async def tell(alive: bool, ready: bool) -> None:
        loop_turns(2 * recipe.generator.stall_seconds)
        await server.health.set_alive(alive)
        await server.health.set_ready(ready)

    merger = None
    if recipe.learner.lora is not None and engine.computes_policy:
        from services.generator.merging import AdapterMerger

        merger = AdapterMerger(recipe.model.path, recipe.model.dtype)
    stager = Stager(client, folders, on_change=lambda: worker.wake(), merger=merger)
    worker = Worker(
        streams,
        engine,
        Updater(
            engine,
            stager,
            client,
            recipe.generator,
            counters,
            tolerance=recipe.parity_tolerance,
            activity=activity,
        ),
        stager,
        recipe.generator,
        counters,
        identity=identity,
        k=recipe.sampling.k,
        beat_seconds=recipe.redis.beat_seconds,
        group_seconds=recipe.schedule.group_deadline_seconds,
        on_health=tell,
        activity=activity,
    )
    return worker


async def _run(worker: Worker, stop: asyncio.Event) -> None:
    """Works until SIGTERM. A `Drain` call ends the work, not the process: it goes on answering."""

    async def drain_on_stop() -> None:
        await stop.wait()
        await worker.drain()

    draining = asyncio.create_task(drain_on_stop())
    try:
        await worker.run()
        await stop.wait()
    finally:
        draining.cancel()


async def _leave(streams: RedisWorkerStreams) -> None:
    with contextlib.suppress(TimeoutError, OffbeatError):
        async with asyncio.timeout(LEAVE_SECONDS):
            await streams.leave()
    await streams.close()
