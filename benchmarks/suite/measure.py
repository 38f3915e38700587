"""Measuring tools: CPU time of processes, and rounds that alternate between the things compared."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil


class CpuMeter:
    """CPU seconds, user and system, of a running process and its children; the threads of each included.

    On a busy machine they say more than wall time: others that run meanwhile do not count.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def read(self) -> float:
        """Seconds so far, all of them together."""
        family = [self._process, *self._process.children(recursive=True)]
        times = [process.cpu_times() for process in family]
        return sum(spent.user + spent.system for spent in times)


class Spent:
    """Wall and CPU seconds by name, added up."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """What this process spends in the block. `time.process_time` has a finer clock than `CpuMeter`."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - wall
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu


def alternate(
    rounds: int, contenders: Mapping[str, Callable[[], float]], *, warm_up: int = 1
) -> dict[str, list[float]]:
    """What each contender returned in each round.

    One after the other in each round, so that a busy moment of the machine hits all alike, and in the opposite order
    in every second one. The first `warm_up` rounds do not count.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        order = list(contenders.items())
        for name, measure in order if number % 2 == 0 else reversed(order):
            value = measure()
            if number >= 0:
                found[name].append(value)
    return found


def ratios(above: list[float], below: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]
