"""Runs the checkpoint service of one run as a process: `python -m services.checkpoint`."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from offbeat.config import Recipe
from offbeat.errors import ConfigError
from offbeat.rpc import RpcServer, terminated
from offbeat.rpc.entry import parse_service_args, run_folder, write_address
from offbeat.streams.redis import RedisVersionMark
from offbeat.telemetry import setup_logs
from offbeat.telemetry.metrics import start_metrics
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
    folder = Path(settings.directory) if settings.directory else run_folder(recipe) / "versions"
    store = VersionStore(folder, recipe.run_id, settings.keep_versions)
    url = recipe.redis.url
    mark = None
    if url is not None:
        mark = RedisVersionMark(url, recipe.run_id, patience_seconds=REDIS_SECONDS)
    servicer = CheckpointServicer(
        store,
        lease_seconds=settings.lease_seconds,
        mark=mark,
        deltas=settings.deltas,
        lend_files=settings.same_host_files,
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
        write_address(recipe, "checkpoint", MEMBER_ID, server.address)
        await servicer.load()
        await server.health.set_ready(True)
        log.info("serving run %s from %s at %s", recipe.run_id, folder, server.address)
        await stop.wait()
        log.info("stopping")
    finally:
        servicer.stop_watches()
        await server.stop(settings.rpc.drain_seconds)
        await servicer.close()
        if mark is not None:
            await mark.close()


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point."""
    recipe = parse_service_args(argv)
    setup_logs(recipe.telemetry, "checkpoint")
    try:
        asyncio.run(serve(recipe))
    except ConfigError as error:
        log.critical("%s", error)
        sys.exit(2)
