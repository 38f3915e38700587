"""What the in-memory adapter's parts share, as they would a Redis. Used by `memory`, and turned and emptied by tests.

Everything that is a script in Redis is a method without `await` here, which is as atomic on one event loop.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offbeat.streams.base import Stream
from offbeat.streams.records import in_flight_field, task_fields
from offbeat.v1 import samples_pb2 as samples

EntryKey = tuple[Stream, str]


@dataclass
class Entry:
    """One entry of a stream."""

    fields: dict[bytes, bytes]
    owner: str | None = None  # None: not delivered yet, or settled and kept (a dead letter)
    since: float = 0.0
    deliveries: int = 0
    lone: str = ""  # "", "next" (must run alone), or the consumer with which it runs alone
    settled: bool = False


@dataclass
class MemoryServer:
    """What the adapters of one run share, as they would a Redis. `clock` tells seconds; a test may turn it."""

    clock: Callable[[], float] = time.monotonic
    full: bool = False
    """Set by a test: issuing is refused, as by a Redis without memory."""
    streams: dict[Stream, dict[str, Entry]] = field(
        default_factory=lambda: {stream: {} for stream in Stream}
    )
    in_flight: dict[str, tuple[int, int]] = field(default_factory=dict)
    beats: dict[tuple[str, str], float] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    term: int = 0
    learner: str = ""
    finished: bool = False
    _count: int = 0

    def add(self, stream: Stream, fields: Mapping[bytes, bytes]) -> None:
        """Adds an entry."""
        self._count += 1
        self.streams[stream][f"{self._count}-0"] = Entry(dict(fields))

    def entry(self, key: EntryKey) -> Entry | None:
        """An entry that is delivered and not settled."""
        entry = self.streams[key[0]].get(key[1])
        return entry if entry is not None and entry.owner is not None else None

    def remove(self, key: EntryKey) -> Entry | None:
        """Takes an entry off its stream: for whoever comes first."""
        return self.streams[key[0]].pop(key[1]) if self.entry(key) is not None else None

    def deliver(self, entry: Entry, consumer: str) -> None:
        """Makes `consumer` the owner and counts the delivery."""
        entry.owner, entry.since = consumer, self.clock()
        entry.deliveries += 1

    def bury(self, key: EntryKey, reason: str, worker: str) -> None:
        """Moves an entry to the dead stream."""
        entry = self.remove(key)
        if entry is None:
            return
        told = {
            "from": key[0],
            "reason": reason,
            "worker": worker,
            "n": str(entry.deliveries),
            "at": f"{1000 * time.time():.0f}",
        }
        kept = {name: value for name, value in entry.fields.items() if name != b"s"}
        self.add(Stream.DEAD, kept | {name.encode(): text.encode() for name, text in told.items()})

    def empty(self) -> None:
        """Loses everything, as an emptied Redis does."""
        for entries in self.streams.values():
            entries.clear()
        self.in_flight.clear()
        self.term = 0

    def forget_evaluations(self) -> None:
        """Removes evaluation tasks that nobody has generated."""
        self.streams[Stream.EVALUATIONS].clear()
        self.in_flight = {n: at for n, at in self.in_flight.items() if n.isdecimal()}

    def is_there(self, ordinal: str, attempt: int) -> bool:
        """Whether an entry of this attempt of a training ordinal lies on a stream, and is not settled."""
        wanted = (ordinal.encode(), str(attempt).encode(), b"%d" % samples.TASK_KIND_TRAIN)
        passed = (Stream.PROMPTS, Stream.ROLLOUTS, Stream.SCORED, Stream.DEAD)
        return any(
            (entry.fields[b"o"], entry.fields[b"a"], entry.fields[b"k"]) == wanted
            for stream in passed
            for entry in self.streams[stream].values()
            if not entry.settled
        )

    def issue(self, task: samples.PromptTask) -> bool:
        """Issues a task unless the same or a newer attempt is under way."""
        name, attempt = in_flight_field(task), (task.term, task.attempt)
        if self.in_flight.get(name, (-1, -1)) >= attempt:
            return False
        self.in_flight[name] = attempt
        self.add(stream_of(task), task_fields(task))
        return True


def stream_of(task: samples.PromptTask) -> Stream:
    evaluation = task.kind == samples.TASK_KIND_EVALUATION
    return Stream.EVALUATIONS if evaluation else Stream.PROMPTS
