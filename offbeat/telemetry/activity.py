"""Who worked and who waited: a cheap record of what a process was doing. Every service writes one, the report reads it.

``<run>/activity/<service>.<member>.jsonl``, one JSON object a line, times in seconds since 1970:

    {"event": "start", "time": …, "service": "generator", "member": "host-123", "environment": {…}}
    {"state": "generate", "start": …, "seconds": 0.25}
    {"event": "update", "time": …, "version": 7, …}

Neighbouring lines of one state belong together. A long run stays small: past `EXACT_LINES` lines, what happened since
the last write is added up by state, and writes become rarer.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offbeat.telemetry.environment import environment

log = logging.getLogger(__name__)

FOLDER = "activity"
WRITE_SECONDS = 2.0
EXACT_LINES = 20_000
COARSE_SHARE = 1 / 1000
"""Past the exact lines a write covers this share of the process's life: a thousand more lines each time it doubles."""

Interval = tuple[str, float, float]
"""State, start and end; of the monotonic clock."""


class Activity:
    """The states of one process. Thread-safe; `enter` costs about a microsecond, a thread of its own writes.

    Where the folder of the run is not there, as in a container without the shared volume, nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._intervals: list[Interval] = []
        self._events: list[dict[str, Any]] = []
        self._state = "start"
        self._began = self._since = time.monotonic()
        self._offset = time.time() - self._began
        self._lines = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, run_folder: Path, service: str, member: str) -> "Activity":
        """Starts the record of a process, which is in the state "start"."""
        found = run_folder.is_dir()
        activity = cls(run_folder / FOLDER / f"{service}.{member}.jsonl" if found else None)
        activity.note("start", service=service, member=member, environment=environment())
        if found:
            activity._thread = threading.Thread(
                target=activity._write_for_ever, name="activity", daemon=True
            )
            activity._thread.start()
        return activity

    @classmethod
    def none(cls) -> "Activity":
        """A record that keeps nothing."""
        return cls(None)

    @property
    def state(self) -> str:
        """The present state."""
        return self._state

    def enter(self, state: str) -> None:
        """The process is in this state from now on."""
        if state == self._state or self._path is None:
            return
        with self._lock:
            now = time.monotonic()
            self._intervals.append((self._state, self._since, now))
            self._state, self._since = state, now

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Is in this state inside the block, and in the present one again after it."""
        before = self._state
        self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    def note(self, event: str, **fields: Any) -> None:
        """Records an event with its time. The fields are what JSON can hold."""
        if self._path is None:
            return
        with self._lock:
            self._events.append({"event": event, "time": round(time.time(), 3), **fields})

    def close(self) -> None:
        """Writes what is left."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # --- writing, on the thread

    def _write_for_ever(self) -> None:
        ended = False
        while not ended:
            seconds = WRITE_SECONDS
            if self._lines > EXACT_LINES:
                seconds = max(seconds, (time.monotonic() - self._began) * COARSE_SHARE)
            ended = self._ended.wait(seconds)
            try:
                self._write()
            except OSError as error:
                # It is for people to look at; the run goes on without.
                log.debug("no activity is recorded any more: %s", error)
                self._path = None
                return

    def _write(self) -> None:
        path = self._path
        assert path is not None
        with self._lock:
            now = time.monotonic()
            intervals = [*self._intervals, (self._state, self._since, now)]
            events, self._intervals, self._events, self._since = self._events, [], [], now
        if self._lines > EXACT_LINES:
            intervals = added_up(intervals)
        lines = [*events, *(self._line(interval) for interval in intervals)]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        self._lines += len(lines)

    def _line(self, interval: Interval) -> dict[str, Any]:
        state, start, end = interval
        return {
            "state": state,
            "start": round(start + self._offset, 4),
            "seconds": round(end - start, 4),
        }


def added_up(intervals: list[Interval]) -> list[Interval]:
    """One interval per state, one after the other: the shares stay, the order within the time is lost."""
    seconds: dict[str, float] = {}
    for state, start, end in intervals:
        seconds[state] = seconds.get(state, 0.0) + end - start
    result: list[Interval] = []
    at = intervals[0][1]
    for state, length in seconds.items():
        result.append((state, at, at + length))
        at += length
    return result
