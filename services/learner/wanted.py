"""How many workers of a role the run could use: what the learner could consume against what one of them produces.

Pure; `scaling` feeds it. Cohorts bound what is queued, so a backlog says little about need. Rates while busy do:

    demand  groups that the learner would use up in a second if it never waited
    supply  groups that one worker finishes in a second in which it has something to do
    wanted  demand / supply, as a whole number that changes only when it is clearly another one

Both rates are independent of how many workers there are, as long as a worker's rate is its own: so the number that is
wanted does not move when the pool does, and the pool settles.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """What somebody did since its start: seconds in which it had something to do, and groups."""

    busy_seconds: float
    groups: float

    def since(self, earlier: "Work") -> "Work":
        """The difference."""
        return Work(self.busy_seconds - earlier.busy_seconds, self.groups - earlier.groups)


@dataclass(frozen=True)
class Reading:
    """The learner's work and that of each worker of a role, by member, at one time (seconds)."""

    time: float
    learner: Work
    workers: Mapping[str, Work] = field(default_factory=dict)


class Balance:
    """The number of workers of one role that keeps the learner busy, and no more.

    `window_seconds`: rates are means over so long, or over two readings where those are further apart. `margin`: by how
    much of a worker's share the demand must pass a whole number before the answer follows.
    """

    def __init__(self, *, window_seconds: float = 300.0, margin: float = 0.1) -> None:
        if not 0 <= margin < 0.5:
            raise ValueError(f"margin: expected 0 <= margin < 0.5, found {margin:g}")
        self._window = window_seconds
        self._margin = margin
        self._readings: deque[Reading] = deque()
        self._wanted: int | None = None
        self.demand = 0.0
        """Groups a second, of the last reading that told."""
        self.supply = 0.0
        """Groups a second of one worker, of the last reading that told."""

    def add(self, reading: Reading) -> None:
        """Takes a reading in; they come in the order of their times."""
        self._readings.append(reading)
        # At least two are kept, however far apart they are.
        while len(self._readings) > 2 and reading.time - self._readings[1].time >= self._window:
            self._readings.popleft()
        first = self._readings[0]
        used = reading.learner.since(first.learner)
        made = _made(self._readings)
        if used.busy_seconds <= 0 or used.groups <= 0 or made.busy_seconds <= 0 or made.groups <= 0:
            return
        self.demand = used.groups / used.busy_seconds
        self.supply = made.groups / made.busy_seconds
        self._wanted = settled(self.demand / self.supply, self._wanted, margin=self._margin)

    def wanted(self, *, present: int, unfinished: bool) -> int:
        """The number; that of the workers `present` before there is anything to go by.

        At least 1 while the run is `unfinished` (steps are left, or groups are under way), else 0.
        """
        if not unfinished:
            return 0
        return max(1, present if self._wanted is None else self._wanted)


def settled(share: float, present: int | None, *, margin: float) -> int:
    """The whole number of workers for a demand of `share` workers, at least 1.

    It stays what it was (`present`) as long as that serves the demand within the margin, and one fewer would not.
    """
    if present is not None and (present - 1) * (1 - margin) < share <= present * (1 + margin):
        return present
    if present is not None and share <= (present - 1) * (1 - margin):
        # The smallest number that would not be left again at once.
        return max(1, math.ceil(share / (1 - margin)))
    return max(1, math.ceil(share))


def _made(readings: Iterable[Reading]) -> Work:
    """What those that are there now did since each was read first: loading a model is no work."""
    first: dict[str, Work] = {}
    now: Mapping[str, Work] = {}
    for reading in readings:
        now = reading.workers
        for name, work in now.items():
            first.setdefault(name, work)
    parts = [work.since(first[name]) for name, work in now.items()]
    return Work(sum(part.busy_seconds for part in parts), sum(part.groups for part in parts))


class Held:
    """How many workers are filled by what is pending, for nine tenths of the time: they must not go.

    A tenth is left for the moments between two cohorts, in which nothing is pending however busy the pool is. Counted
    against the most that one of them held, and never more than there are: it blocks scale-in and causes no scale-out.
    """

    def __init__(self, *, window_seconds: float = 60.0) -> None:
        self._window = window_seconds
        self._filled: deque[tuple[float, int]] = deque()
        self._present = 0

    def add(self, time: float, pending: Iterable[int]) -> None:
        """Entries that each worker holds, at a time in seconds."""
        held = list(pending)
        most = max(held, default=0)
        self._present = len(held)
        self._filled.append((time, math.ceil(sum(held) / most) if most else 0))
        while self._filled and self._filled[0][0] < time - self._window:
            self._filled.popleft()

    @property
    def workers(self) -> int:
        """The number; 0 as long as less than a moment is known."""
        if not self._filled:
            return 0
        counts = sorted(count for _, count in self._filled)
        return min(counts[len(counts) // 10], self._present)
