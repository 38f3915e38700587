"""Services as processes of their own, for tests that kill and restart them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from offbeat import rpc

START_SECONDS = 60.0
"""Longest wait for a service; generous, since a busy machine is no failure."""


class Service:
    """`python -m services.<name>` with a recipe; ended at the latest when the `with` block ends."""

    def __init__(
        self,
        name: str,
        recipe: Path,
        folder: Path,
        *,
        member_id: str = "0",
        overrides: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`folder` is the run's folder, where the service writes its address; its log goes there."""
        self.name = name
        self.log = folder / f"{name}.{member_id}.log"
        self._address = folder / "addresses" / f"{name}.{member_id}"
        options = [part for override in overrides for part in ("--set", override)]
        self._command = [
            sys.executable,
            "-m",
            f"services.{name}",
            "--recipe",
            str(recipe),
            *options,
        ]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def start(self) -> None:
        """Starts the process. It may be started again once it ended."""
        self._address.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stderr=log, env=self._environment)

    async def ready(self, seconds: float = START_SECONDS) -> str:
        """Waits until the service says that it serves; returns its address."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._address.exists() and await is_serving(self._address.read_text()):
                return self._address.read_text()
            if self.process.poll() is not None:
                break
            await asyncio.sleep(0.02)
        raise AssertionError(f"{self.name} did not get ready:\n{self.log.read_text()[-4000:]}")

    async def ended(self) -> int:
        """Waits until the process ended by itself; returns its exit code."""
        return await asyncio.to_thread(self.process.wait, START_SECONDS)

    def kill(self) -> None:
        """As `kill -9`."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """As Kubernetes does; returns the exit code."""
        self.process.terminate()
        return self.process.wait(START_SECONDS)

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The process that was started last."""
        assert self._process is not None, "start() first"
        return self._process


async def is_serving(address: str, name: str = "") -> bool:
    """Whether the server at `address` is there and healthy."""
    return await health(address, name) == health_pb2.HealthCheckResponse.SERVING


async def health(address: str, name: str = "") -> int | None:
    """What the health service answers; None when nobody does."""
    async with rpc.connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            request = health_pb2.HealthCheckRequest(service=name)
            return (await stub.Check(request, timeout=5.0)).status
        except grpc.aio.AioRpcError as error:
            if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
                return None  # CANCELLED: it came as the server began to stop.
            raise
