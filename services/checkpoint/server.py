"""Runs the checkpoint service of one run as a process: `python -m services.checkpoint`."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from offbeat.config import Recipe
from offbeat.errors import OffbeatError
from offbeat.rpc import RpcServer, terminated
from offbeat.rpc.entry import parse_service_args, run_folder, write_address
from offbeat.rpc.memory import keep_freed_memory
from offbeat.streams.redis import RedisVersionMark
from offbeat.telemetry import setup_logs
from offbeat.telemetry.metrics import start_metrics
from offbeat.weights.client import CheckpointClient
from services.checkpoint.service import SERVICE_NAME, CheckpointServicer, add_to_server
from services.checkpoint.store import VersionStore

log = logging.getLogger(__name__)

MEMBER_ID = "0"
"""A run has one checkpoint service."""

REDIS_SECONDS = 10.0
"""Longest wait for the version mark; a publish is then refused, and made again by its client."""


async def serve(recipe: Recipe) -> None:
    """Serves until SIGTERM or SIGINT. Raises `ConfigError` when it can't start."""
    settings = recipe.checkpoint
    name = "versions" if settings.upstream is None else "relay"
    folder = Path(settings.directory) if settings.directory else run_folder(recipe) / name
    store = VersionStore(folder, recipe.run_id, settings.keep_versions)
    url = recipe.redis.url
    mark = None
    if url is not None and settings.upstream is None:
        mark = RedisVersionMark(
            url,
            recipe.run_id,
            patience_seconds=REDIS_SECONDS,
            password_file=recipe.redis.password_file,
        )
    servicer = CheckpointServicer(
        store,
        lease_seconds=settings.lease_seconds,
        mark=mark,
        deltas=settings.deltas,
        lend_files=settings.same_host_files,
        upstream=_upstream(recipe),
    )
    registry = CollectorRegistry()
    registry.register(servicer.counters)
    server = RpcServer(
        settings.rpc,
        SERVICE_NAME,
        lambda server: add_to_server(servicer, server),
    )
    stop = terminated()
    await server.start()
    try:
        start_metrics(settings.rpc, registry)
        if settings.upstream is None:
            write_address(recipe, "checkpoint", MEMBER_ID, server.address)
        else:
            write_address(recipe, "relay", str(server.port), server.address)
        await servicer.load()
        await server.health.set_ready(True)
        log.info("serving run %s from %s at %s", recipe.run_id, folder, server.address)
        await _until_stopped(stop, servicer)
        log.info("stopping")
    finally:
        servicer.stop_watches()
        await server.stop(settings.rpc.drain_seconds)
        await servicer.close()
        if mark is not None:
            await mark.close()


def _upstream(recipe: Recipe) -> CheckpointClient | None:
    """The connection of a relay to the service that it mirrors."""
    address = recipe.checkpoint.upstream
    if address is None:
        return None
    return CheckpointClient(address, recipe.run_id, f"relay-{socket.getfqdn()}-{os.getpid()}")


async def _until_stopped(stop: asyncio.Event, servicer: CheckpointServicer) -> None:
    """Waits for the signal. Raises what ended a relay's mirroring before that."""
    waiting = asyncio.create_task(stop.wait())
    tasks = {waiting} if servicer.mirroring is None else {waiting, servicer.mirroring}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        assert servicer.mirroring is not None
        servicer.mirroring.result()


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point."""
    recipe = parse_service_args(argv)
    keep_freed_memory()
    setup_logs(recipe.telemetry, "checkpoint")
    try:
        asyncio.run(serve(recipe))
    except OffbeatError as error:
        log.critical("%s", error)
        sys.exit(2)
