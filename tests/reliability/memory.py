"""Resident sizes of a run's processes over time, and whether they grow."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

from tests.harness.faulted_run import FaultedRun

SERVICES = ("generator", "reward", "learner", "checkpoint")
MIB = 1024**2
BLOCKS = 8
"""Parts that the time is cut into for the interval of a slope."""
T_95 = 2.36
"""Student's t for `BLOCKS` - 1 degrees of freedom, two-sided."""


@dataclass(frozen=True)
class Growth:
    """One service's memory."""

    processes: int
    samples: int
    median_mib: float
    slope_mib_per_hour: float
    low: float
    high: float

    def shown(self, share_per_hour: float, mib_per_hour: float = 0.0) -> bool:
        """Whether the service is shown to grow by more than that share of its size in an hour, and than so many MiB."""
        return self.low > max(mib_per_hour, share_per_hour * self.median_mib)


@dataclass
class Memory:
    """Samples of resident sizes: service -> pid -> [(seconds, MiB)]."""

    warm_up_seconds: float
    """What a process does in its first seconds is no growth."""
    samples: dict[str, dict[int, list[tuple[float, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def sample(self, run: FaultedRun) -> None:
        """Looks at all processes."""
        found = [(service, pid) for service in SERVICES for pid in run.pids(service)]
        for service, pid in [*found, ("Redis", run.redis_pid), ("offbeat run", run.pid)]:
            try:
                process = psutil.Process(pid)
                old_enough = time.time() - process.create_time() > self.warm_up_seconds
                size = process.memory_info().rss / MIB
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if old_enough:
                self.samples[service][pid].append((time.monotonic(), size))

    def growth(self) -> dict[str, Growth]:
        """By service; those with too few samples are left out."""
        return {name: found for name, each in self.samples.items() if (found := growth(each))}


def growth(processes: dict[int, list[tuple[float, float]]]) -> Growth | None:
    """One slope for all processes, each with a level of its own; its interval by leaving out each part of the time."""
    rows = [(pid, at, size) for pid, found in processes.items() for at, size in found]
    if len(rows) < 10 * BLOCKS:
        return None
    first, last = min(row[1] for row in rows), max(row[1] for row in rows)

    def block(row: tuple[int, float, float]) -> int:
        return min(BLOCKS - 1, int(BLOCKS * (row[1] - first) / max(1e-9, last - first)))

    whole = slope(rows)
    without = [slope([row for row in rows if block(row) != left_out]) for left_out in range(BLOCKS)]
    mean = statistics.fmean(without)
    error = ((BLOCKS - 1) / BLOCKS * sum((one - mean) ** 2 for one in without)) ** 0.5
    return Growth(
        processes=len(processes),
        samples=len(rows),
        median_mib=statistics.median(size for *_, size in rows),
        slope_mib_per_hour=3600 * whole,
        low=3600 * (whole - T_95 * error),
        high=3600 * (whole + T_95 * error),
    )


def slope(rows: Iterable[tuple[int, float, float]]) -> float:
    """Least squares with a level for each process; MiB per second."""
    by_process: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for pid, at, size in rows:
        by_process[pid].append((at, size))
    above = below = 0.0
    for found in by_process.values():
        at_mean = statistics.fmean(at for at, _ in found)
        size_mean = statistics.fmean(size for _, size in found)
        above += sum((at - at_mean) * (size - size_mean) for at, size in found)
        below += sum((at - at_mean) ** 2 for at, _ in found)
    return above / below if below else 0.0
