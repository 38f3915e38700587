"""What the weight path is measured with: services of their own processes, raw TCP, and a plain gRPC stream."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from offbeat import rpc
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.client import CheckpointClient

RUN = "weights-benchmark"
MIB = 1024**2
RAW_SENDER = """
import socket, sys
data = bytearray(int(sys.argv[1]))
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        if connection.recv(1):
            connection.sendall(data)
"""


@dataclass(frozen=True)
class CheckpointService:
    """A checkpoint service as it runs in a run."""

    address: str
    pid: int


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A child that ends with the block."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.terminate()
        child.wait()


@contextlib.asynccontextmanager
async def service(folder: Path, upstream: str | None = None) -> AsyncIterator[CheckpointService]:
    """A service of its own process, with its versions in `folder`; a relay when it has an upstream."""
    folder.mkdir(parents=True)
    recipe = folder / "recipe.yaml"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"directory": str(folder / "store"), "rpc": {"bind": address}, "keep_versions": 2}
    tree = {
        "run": {"id": RUN, "directory": str(folder / "runs")},
        "model": {"path": "unused"},
        "data": {"train": {"kind": "jsonl", "path": "unused.jsonl"}},
        "sampling": {"max_tokens": 8},
        "schedule": {"steps": 1, "prompts_per_step": 1},
        "learner": {"loss": {"name": "online_dpo"}},
        "reward": {"functions": [{"name": "length"}]},
        "telemetry": {"log_level": "WARNING"},
        "checkpoint": settings | ({"upstream": upstream} if upstream else {}),
    }
    recipe.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "services.checkpoint", "--recipe", str(recipe)]
    with process(command) as child:
        client = CheckpointClient(address, RUN, "benchmark")
        await client.status(deadline_seconds=60)
        await client.close()
        yield CheckpointService(address, child.pid)


class RawTcp:
    """One loopback connection without anything else: the ceiling. Receives into memory that is there."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffer = memoryview(bytearray(nbytes))
        self._stack = contextlib.ExitStack()
        command = [sys.executable, "-c", RAW_SENDER, str(nbytes)]
        sender = self._stack.enter_context(process(command))
        assert sender.stdout is not None
        self._port = int(sender.stdout.readline())

    def close(self) -> None:
        """Ends the sender."""
        self._stack.close()

    async def seconds(self) -> float:
        """For all bytes."""
        return await asyncio.to_thread(self._receive)

    def _receive(self) -> float:
        started = time.perf_counter()
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(b"x")
            got = 0
            while got < self._nbytes:
                got += connection.recv_into(self._buffer[got : got + MIB])
        return time.perf_counter() - started


async def plain_grpc(address: str) -> float:
    """Seconds for a full fetch by the generated stub, which neither checks nor keeps the bytes."""
    started = time.perf_counter()
    async with rpc.connect(address) as channel:
        stub = checkpoint_grpc.CheckpointServiceStub(channel)
        stream = stub.Fetch(checkpoint.FetchRequest(run_id=RUN, receiver_id=os.urandom(4).hex()))
        async for message in stream:
            len(message.chunk.data)
    return time.perf_counter() - started


async def staged(client: CheckpointClient, folder: Path, version: int, **how: bool) -> float:
    """Seconds for a fetch into a file, verified."""
    started = time.perf_counter()
    (await client.stage(folder, version=version, deadline_seconds=600, **how)).discard()
    return time.perf_counter() - started
