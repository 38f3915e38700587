"""Runs a recipe on this machine, from the start of its processes to their end. Used by `offbeat run`."""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from typing import Protocol

from offbeat.config import Recipe
from offbeat.errors import ServiceUnavailable
from offbeat.local import commands
from offbeat.local.addresses import (
    REDIS,
    forget_addresses,
    wait_for_address,
    write_redis_address,
)
from offbeat.local.folder import RunFolder
from offbeat.local.model import check_model, prepare_model
from offbeat.local.redis_server import MIB, find_server, free_port, server_command, server_url
from offbeat.local.restarts import RestartPolicy
from offbeat.local.supervisor import ProcessSpec, Supervisor, with_overrides
from offbeat.local.threads import cores_available
from offbeat.local.watch import watch_progress
from offbeat.streams.redis import wait_for_redis
from offbeat.v1 import learner_pb2 as learner

ADDRESS_SECONDS = 60.0
"""The checkpoint service loads no model: its port is bound within a second or two."""
REDIS_SECONDS = 30.0
"""It reads its data first."""
LAST_WORD_SECONDS = 2.0
"""The learner's last message may still be on its way when its process has ended."""


class Observer(Protocol):
    """Is told what happens, to show it."""

    def event(self, text: str) -> None:
        """Something that happens once: a start, a crash."""

    def progress(self, progress: learner.Progress) -> None:
        """Where the run is."""


@dataclass
class Outcome:
    """How a run ended, and its wall times in seconds."""

    progress: learner.Progress | None = None
    prepare_seconds: float = 0.0
    start_seconds: float = 0.0
    train_seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether all steps were done. A learner that was told to stop ends well, too, but earlier."""
        last = self.progress
        if last is None:
            return True  # it ended well before anybody could follow it
        done = last.state == learner.LEARNER_STATE_FINISHED
        return done or 0 < last.total_steps <= last.step


async def run_recipe(recipe: Recipe, folder: RunFolder, observer: Observer) -> Outcome:
    """Runs until the learner is done; then, or on an error or when cancelled, stops all that it started.

    Raises `ModelError` (no model), `ConfigError` (a process refuses its settings), `ProcessFailed` (one crashed too
    often). `folder` must be locked by the caller.
    """
    outcome = Outcome()
    started = time.monotonic()
    if check_model(recipe):
        observer.event(f"{recipe.model.path} does not exist yet: preparing the model first")
        await prepare_model(recipe, folder.recipe_file, logs=folder.logs)
        outcome.prepare_seconds = time.monotonic() - started
    started = time.monotonic()

    def on_progress(progress: learner.Progress) -> None:
        if outcome.start_seconds == 0 and progress.state != learner.LEARNER_STATE_STARTING:
            outcome.start_seconds = time.monotonic() - started
        outcome.progress = progress
        observer.progress(progress)

    grace = commands.grace_seconds(recipe)
    with tempfile.TemporaryDirectory(prefix="offbeat-", ignore_cleanup_errors=True) as scratch:
        supervisor = Supervisor(
            folder.logs,
            report=observer.event,
            grace_seconds=grace,
            policy=lambda: RestartPolicy(
                max_quick=recipe.run.max_quick_crashes, max_delay=recipe.run.max_restart_seconds
            ),
            env=commands.scratch_environment(scratch),
        )
        async with supervisor:
            await _start_all(recipe, folder, supervisor)
            observer.event("all processes are started; models are loading")
            watching = asyncio.create_task(watch_progress(folder.addresses, on_progress))
            try:
                await supervisor.finished()
                await asyncio.wait({watching}, timeout=LAST_WORD_SECONDS)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            outcome.train_seconds = time.monotonic() - started - outcome.start_seconds
    return outcome


async def _start_all(recipe: Recipe, folder: RunFolder, supervisor: Supervisor) -> None:
    forget_addresses(folder.addresses, (*commands.SERVICES, REDIS))
    cores = cores_available()
    redis_url = recipe.redis.url or await _start_redis(recipe, folder, supervisor)
    address = recipe.checkpoint.address
    if address is None:
        spec = commands.checkpoint_spec(
            recipe, folder.recipe_file, redis_url=redis_url, cores=cores
        )
        address = await _start_checkpoint(recipe, folder, supervisor, spec)
    for spec in commands.worker_specs(
        recipe, folder.recipe_file, redis_url=redis_url, checkpoint_address=address, cores=cores
    ):
        supervisor.start(spec)


async def _start_redis(recipe: Recipe, folder: RunFolder, supervisor: Supervisor) -> str:
    """Starts the embedded server. Its data stays in the run's folder, across crashes and a resume."""
    data = folder.path / "redis"
    data.mkdir(exist_ok=True)
    port = free_port()
    limit = recipe.redis.embedded_max_memory_mb * MIB
    command = server_command(find_server(), data, port, max_memory_bytes=limit)
    supervisor.start(ProcessSpec(REDIS, tuple(command), stop_order=commands.REDIS_STOPS))
    url = server_url(port)
    try:
        await wait_for_redis(url, REDIS_SECONDS)
    except ServiceUnavailable:
        supervisor.check()  # it may have crashed; its log says more
        raise
    write_redis_address(folder.addresses, url)
    return url


async def _start_checkpoint(
    recipe: Recipe, folder: RunFolder, supervisor: Supervisor, spec: ProcessSpec
) -> str:
    supervisor.start(spec)
    address = await wait_for_address(
        folder.addresses, "checkpoint", seconds=ADDRESS_SECONDS, check=supervisor.check
    )
    host, _, port = recipe.checkpoint.rpc.bind.rpartition(":")
    if port == "0":
        # The others know this port: after a crash the service must come back at the same place.
        bound = address.rpartition(":")[2]
        supervisor.amend(with_overrides(spec, f"checkpoint.rpc.bind={host}:{bound}"))
    return address
