"""Measures the weight path beside raw TCP and a plain gRPC stream, in one run, interleaved.

    python -m benchmarks.weights [--megabytes 269] [--rounds 5] [--changed 0.0034] [--receivers 1 4 16]

The checkpoint service runs as it does in a run, in a process of its own; publisher and receivers are
in this one. The weights have SmolLM2-135M's size and random bits; each step moves a share of the
bfloat16 values by one unit, which is what a step of training does to most of those that it changes.
Every staged version is compared by hash. Medians are printed, and ratios to raw TCP of the same
rounds; look at the ratios. Results: docs/results/weights.md.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import yaml

from offbeat import rpc
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.v1 import checkpoint_pb2_grpc as checkpoint_grpc
from offbeat.weights.client import CheckpointClient, PublishBase
from offbeat.weights.manifest import describe

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

Weights = list[tuple[str, str, tuple[int, ...], np.ndarray]]


class Steps:
    """A policy in bfloat16 whose steps change a share of the values."""

    def __init__(self, nbytes: int, changed: float) -> None:
        rng = np.random.default_rng(0)
        self._rng = rng
        self._changed = changed
        # Like SmolLM2: one large embedding, 30 layers of 9 tensors.
        layer = nbytes * 4 // 5 // 30 // 9 // 2
        sizes = [nbytes // 5 // 2] + [layer] * 270
        self._tensors = [rng.integers(0, 2**16, size, np.uint16) for size in sizes]

    def next(self) -> Weights:
        """A copy of the weights after one more step."""
        for tensor in self._tensors:
            count = int(len(tensor) * self._changed)
            places = self._rng.integers(0, len(tensor), count)
            tensor[places] += self._rng.choice(np.array([1, 65535], np.uint16), count)
        return [
            (f"t{index}", "bfloat16", tensor.shape, tensor.copy())
            for index, tensor in enumerate(self._tensors)
        ]


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
async def service(folder: Path, upstream: str | None = None) -> AsyncIterator[str]:
    """The address of a checkpoint service of its own process; a relay when it has an upstream."""
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"directory": str(folder / "store"), "rpc": {"bind": address}}
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
    with process([sys.executable, "-m", "services.checkpoint", "--recipe", str(recipe)]):
        client = CheckpointClient(address, RUN, "benchmark")
        await client.status(deadline_seconds=60)
        await client.close()
        yield address


def raw_tcp(port: int, nbytes: int) -> float:
    """Seconds for all bytes over one loopback connection, received into memory that is there."""
    buffer = memoryview(bytearray(nbytes))
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"x")
        got = 0
        while got < nbytes:
            got += connection.recv_into(buffer[got : got + MIB])
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
    (await client.stage(folder, version=version, deadline_seconds=300, **how)).discard()
    return time.perf_counter() - started


class Bench:
    """One service, one publisher, and what was measured, by name."""

    def __init__(self, address: str, folder: Path, steps: Steps, raw_port: int) -> None:
        self.address = address
        self.folder = folder
        self.steps = steps
        self.raw_port = raw_port
        self.seconds: dict[str, list[float]] = {}
        self.learner = CheckpointClient(address, RUN, "learner")
        self.receiver = CheckpointClient(address, RUN, "receiver", deltas=True)
        self.local = CheckpointClient(address, RUN, "local", same_host=True)
        self.step = 0
        self.base: PublishBase | None = None

    def note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    async def publish(self) -> tuple[int, float]:
        """Publishes the next step; the version, and the seconds from snapshot in memory to commit."""
        weights = self.steps.next()
        buffers = [buffer for *_, buffer in weights]
        started = time.perf_counter()
        manifest = describe(weights)
        self.note("hash at the learner", time.perf_counter() - started)
        manifest.term, manifest.step = 1, self.step
        manifest.kind = checkpoint.WEIGHTS_KIND_FULL
        started = time.perf_counter()
        reply = await self.learner.publish(manifest, buffers, base=self.base, deadline_seconds=300)
        seconds = time.perf_counter() - started
        self.base = PublishBase(reply.manifest, buffers)
        self.step += 1
        return reply.manifest.version, seconds

    async def round(self, nbytes: int) -> None:
        """Everything once, so that a busy moment of the machine hits all alike."""
        self.note("raw TCP", await asyncio.to_thread(raw_tcp, self.raw_port, nbytes))
        version, seconds = await self.publish()
        down = await staged(self.receiver, self.folder / "delta", version)
        self.note("delta: publish", seconds)
        self.note("delta: fetch, apply, verify", down)
        self.note("delta: publish to staged", seconds + down)
        self.note("raw TCP", await asyncio.to_thread(raw_tcp, self.raw_port, nbytes))
        fresh = CheckpointClient(self.address, RUN, f"fresh-{version}")
        self.note(
            "full fetch, staged", await staged(fresh, self.folder / "full", version, full=True)
        )
        await fresh.close()
        self.note("raw TCP", await asyncio.to_thread(raw_tcp, self.raw_port, nbytes))
        self.note("mapped file, verified", await staged(self.local, self.folder / "none", version))
        self.note("plain gRPC, not kept", await plain_grpc(self.address))

    async def close(self) -> None:
        for client in (self.learner, self.receiver, self.local):
            await client.close()


async def fan_out(bench: Bench, address: str, count: int, name: str) -> None:
    """Seconds from publish until `count` receivers have staged one step's delta."""
    receivers = [
        CheckpointClient(address, RUN, f"{name}-{index}", deltas=True) for index in range(count)
    ]
    folders = [bench.folder / f"{name}-{index}" for index in range(count)]
    assert bench.base is not None
    held = bench.base.manifest.version
    pairs = list(zip(receivers, folders, strict=True))
    await asyncio.gather(*(staged(r, folder, held) for r, folder in pairs))
    started = time.perf_counter()
    version, _ = await bench.publish()
    await asyncio.gather(*(staged(r, folder, version) for r, folder in pairs))
    bench.note(f"{name}: publish to staged", time.perf_counter() - started)
    for receiver in receivers:
        await receiver.close()


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Runs everything and prints it."""
    steps = Steps(int(options.megabytes * 1e6), options.changed)
    nbytes = sum(tensor.nbytes for *_, tensor in steps.next())
    raw = process([sys.executable, "-c", RAW_SENDER, str(nbytes)])
    async with service(folder / "root") as root:
        with raw as sender:
            assert sender.stdout is not None
            bench = Bench(root, options.staging, steps, int(sender.stdout.readline()))
            version, _ = await bench.publish()
            await staged(bench.receiver, bench.folder / "delta", version)
            bench.seconds.clear()
            for _ in range(options.rounds):
                await bench.round(nbytes)
            sent = bench.learner.counts.bytes["delta"] / bench.learner.counts.transfers["delta"]
            for count in options.receivers:
                await fan_out(bench, root, count, f"{count} receivers")
            if options.receivers:
                async with service(folder / "relay", root) as relay:
                    await fan_out(bench, relay, max(options.receivers), "behind a relay")
                    status = await bench.learner.status()
                    print(f"sent by the root in all: {status.sent_bytes / nbytes:.3f} of full")
            await bench.close()
    report(bench, nbytes, sent)


def report(bench: Bench, nbytes: int, sent: float) -> None:
    """Prints medians; beside raw TCP: how many times its rate."""
    raw = statistics.median(bench.seconds["raw TCP"])
    print(f"{nbytes / 1e6:.0f} MB; a step's delta {100 * sent / nbytes:.3f} % of it")
    print("| what | seconds (median) | full bytes, GB/s | of raw TCP |\n|---|---|---|---|")
    for name, values in bench.seconds.items():
        found = statistics.median(values)
        print(f"| {name} | {found:.3f} | {nbytes / found / 1e9:.2f} | {raw / found:.2f} |")


def main() -> None:
    """The entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=269.0, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--changed", type=float, default=0.0034, help="share of values per step")
    parser.add_argument("--receivers", type=int, nargs="*", default=[1, 4, 16])
    options = parser.parse_args()
    # As in a run: the service keeps its versions on a disk, receivers stage in shared memory.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-weights-") as folder,
        tempfile.TemporaryDirectory(prefix="offbeat-weights-", dir=memory) as staging,
    ):
        options.staging = Path(staging)
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
