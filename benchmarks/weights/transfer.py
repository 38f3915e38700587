"""One publisher and one receiver: deltas, full transfers and the file on the same host, in rounds with raw TCP."""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.suite.cells import AT_LEAST, AT_MOST, Row
from benchmarks.suite.measure import CpuMeter, ratios
from benchmarks.weights.processes import RUN, CheckpointService, RawTcp, plain_grpc, service, staged
from benchmarks.weights.versions import Weights
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.client import CheckpointClient, PublishBase
from offbeat.weights.manifest import describe

RAW = "raw TCP"


class Publisher:
    """Publishes one version after the other, each as a delta to the one before."""

    def __init__(self, address: str, versions: Iterator[Weights]) -> None:
        self.client = CheckpointClient(address, RUN, "learner")
        self._versions = versions
        self._base: PublishBase | None = None
        self.step = 0
        self.newest = 0
        self.nbytes = 0

    async def next(self) -> tuple[float, float]:
        """Seconds for the hashes, and from there to the commit."""
        weights = next(self._versions)
        buffers = [buffer for *_, buffer in weights]
        self.nbytes = sum(buffer.nbytes for buffer in buffers)
        started = time.perf_counter()
        manifest = describe(weights)
        hashing = time.perf_counter() - started
        manifest.term, manifest.step = 1, self.step
        manifest.kind = checkpoint.WEIGHTS_KIND_FULL
        started = time.perf_counter()
        reply = await self.client.publish(manifest, buffers, base=self._base, deadline_seconds=600)
        seconds = time.perf_counter() - started
        self._base = PublishBase(reply.manifest, buffers)
        self.step += 1
        self.newest = reply.manifest.version
        return hashing, seconds


class Sitting:
    """What was measured, by name: seconds, and CPU seconds of this process and the service together."""

    def __init__(self, meter: CpuMeter) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self._meter = meter

    @asynccontextmanager
    async def on(self, name: str) -> AsyncIterator[None]:
        """Notes what the block takes."""
        cpu, started = self._meter.read(), time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        self.cpu.setdefault(name, []).append(self._meter.read() - cpu)

    def note(self, name: str, seconds: float) -> None:
        """Seconds that were measured elsewhere."""
        self.seconds.setdefault(name, []).append(seconds)


def measure(
    versions: Iterator[Weights], *, rounds: int, full: bool = True, share: float | None = None
) -> list[Row]:
    """The rows of a cell. `share`: of the full bytes that a step's delta may take; `full`: full fetches too."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-weights-") as folder,
        # As in a run: the service keeps its versions on a disk, receivers stage in shared memory.
        tempfile.TemporaryDirectory(prefix="offbeat-weights-", dir=memory) as staging,
    ):
        return asyncio.run(_measure(versions, rounds, full, share, Path(folder), Path(staging)))


async def _measure(
    versions: Iterator[Weights],
    rounds: int,
    full: bool,
    share: float | None,
    folder: Path,
    staging: Path,
) -> list[Row]:
    async with service(folder / "root") as root:
        publisher = Publisher(root.address, versions)
        delta = CheckpointClient(root.address, RUN, "receiver", deltas=True)
        mapped = CheckpointClient(root.address, RUN, "local", same_host=True)
        sitting = Sitting(CpuMeter(os.getpid()))
        await publisher.next()
        await staged(delta, staging / "delta", publisher.newest)
        raw = RawTcp(publisher.nbytes)
        with contextlib.closing(raw):
            for number in range(-1, rounds):
                if number == 0:  # the first round is to warm up
                    sitting = Sitting(CpuMeter(os.getpid()))
                await _round(sitting, publisher, delta, mapped, raw, root, staging, full)
        found = _rows(sitting, publisher, share)
        for client in (publisher.client, delta, mapped):
            await client.close()
        return found


async def _round(
    sitting: Sitting,
    publisher: Publisher,
    delta: CheckpointClient,
    mapped: CheckpointClient,
    raw: RawTcp,
    root: CheckpointService,
    staging: Path,
    full: bool,
) -> None:
    """Everything once, so that a busy moment of the machine hits all alike."""
    sitting.note(RAW, await raw.seconds())
    async with sitting.on("publish"):
        hashing, publishing = await publisher.next()
    sitting.note("hash", hashing)
    async with sitting.on("stage"):
        fetching = await staged(delta, staging / "delta", publisher.newest)
    sitting.note("delta", publishing + fetching)
    sitting.note("delta up", publishing)
    sitting.note("delta down", fetching)
    async with sitting.on("mapped"):
        await staged(mapped, staging / "none", publisher.newest)
    if not full:
        return
    fresh = CheckpointClient(root.address, RUN, f"fresh-{publisher.newest}")
    async with sitting.on("full"):
        await staged(fresh, staging / "full", publisher.newest, full=True)
    await fresh.close()
    sitting.note("plain gRPC", await plain_grpc(root.address))


def _rows(sitting: Sitting, publisher: Publisher, share: float | None) -> list[Row]:
    counts = publisher.client.counts
    sent = 100 * counts.bytes["delta"] / max(1, counts.transfers["delta"]) / publisher.nbytes
    seconds, raw = sitting.seconds, sitting.seconds[RAW]
    gigabytes = publisher.nbytes / 1e9
    rows = [
        Row("full bytes", [publisher.nbytes / 1e6], "MB"),
        Row("raw TCP", [gigabytes / value for value in raw], "GB/s"),
        Row("a step's delta", [sent], "% of the full bytes", share and (AT_MOST, 100 * share)),
        Row("delta: encode, publish, apply, verify at the service", seconds["delta up"], "s"),
        Row("delta: fetch, apply, verify at the receiver", seconds["delta down"], "s"),
        Row("delta: publish to staged", seconds["delta"], "s"),
        Row(
            "delta: publish to staged ÷ raw TCP for the full bytes",
            ratios(seconds["delta"], raw),
            "x",
            (AT_MOST, 1.0),
        ),
        Row("hashes at the learner, beside the next step", seconds["hash"], "s"),
        Row(
            "the service's file on the same host: rate ÷ raw TCP's",
            ratios(raw, seconds["mapped"]),
            "x",
            (AT_LEAST, 1.0),
        ),
    ]
    if "full" in seconds:
        rows += [
            Row("full fetch, written and verified", seconds["full"], "s"),
            Row(
                "full fetch: rate ÷ raw TCP's", ratios(raw, seconds["full"]), "x", (AT_LEAST, 0.45)
            ),
            Row(
                "plain gRPC, neither checked nor kept: rate ÷ raw TCP's",
                ratios(raw, seconds["plain gRPC"]),
                "x",
            ),
            Row("full fetch, CPU of both ends", _per_gigabyte(sitting, "full", gigabytes), "s/GB"),
        ]
    rows += [
        Row(
            "delta up, hashes included, CPU of both ends",
            _per_gigabyte(sitting, "publish", gigabytes),
            "s/GB of weights",
        ),
        Row(
            "delta down, CPU of both ends",
            _per_gigabyte(sitting, "stage", gigabytes),
            "s/GB of weights",
        ),
        Row("same host, CPU of both ends", _per_gigabyte(sitting, "mapped", gigabytes), "s/GB"),
    ]
    return rows


def _per_gigabyte(sitting: Sitting, name: str, gigabytes: float) -> list[float]:
    return [value / gigabytes for value in sitting.cpu[name]]
