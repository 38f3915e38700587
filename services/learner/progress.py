"""Where the run is, for people and for the service: progress, and the hand on the brake."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from offbeat.v1 import learner_pb2 as learner


class Controls:
    """What a caller of the service or a signal asked for; the loop looks at it between steps."""

    def __init__(self) -> None:
        self.on_stop: Callable[[], object] = lambda: None
        """Is called when the loop shall stop, to end its waits."""
        self._running = threading.Event()
        self._running.set()
        self.stop = threading.Event()
        self.save_on_stop = True
        self.save = threading.Event()
        self.stopped_by_caller = False

    @property
    def paused(self) -> bool:
        """Whether the loop shall stand still."""
        return not self._running.is_set() and not self.stop.is_set()

    def request_stop(self) -> None:
        """Asks the loop to end after the present step."""
        self.stop.set()
        self.on_stop()

    def pause(self) -> None:
        """Asks the loop to stand still after the present step."""
        self._running.clear()

    def resume(self) -> None:
        """Lets the loop go on."""
        self._running.set()


class Board:
    """The present progress. Written by the loop's thread, read by the service; also tells watchers of changes."""

    def __init__(self, *, total_steps: int, event_loop: asyncio.AbstractEventLoop) -> None:
        self._lock = threading.Lock()
        self._progress = learner.Progress(
            state=learner.LEARNER_STATE_STARTING, total_steps=total_steps
        )
        self._event_loop = event_loop
        self._changed = asyncio.Condition()
        self._changes = 0
        self.started = time.monotonic()
        self.waiting_seconds = 0.0
        self.checkpoint_step = 0
        self.checkpoint_path = ""

    def read(self) -> learner.Progress:
        """A copy of the present progress."""
        with self._lock:
            copy = learner.Progress()
            copy.CopyFrom(self._progress)
            return copy

    def update(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        counts: Mapping[str, int] | None = None,
        **fields: Any,
    ) -> None:
        """Sets fields (`counts`: trained, filtered, dead), merges metrics, and wakes the watchers. Thread-safe."""
        with self._lock:
            for name, value in {**fields, **(counts or {})}.items():
                setattr(self._progress, name, value)
            for name, value in (metrics or {}).items():
                self._progress.metrics[name] = value
            self._progress.time_unix_ms = int(time.time() * 1000)
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._notify()))

    async def _notify(self) -> None:
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[learner.Progress]:
        """The present progress, then the newest one after each change."""
        seen = -1
        while True:
            async with self._changed:
                while self._changes == seen:
                    await self._changed.wait()
                seen = self._changes
            yield self.read()
