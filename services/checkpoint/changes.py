"""Runs what changes the store: one change at a time, each to its end. Used by all of this service that writes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Reply = TypeVar("Reply")


class Changes:
    """A lock, and the tasks that hold it or wait for it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def exclusively(self, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Does `work` when no other change is under way, to its end even if the caller goes away."""
        return await asyncio.shield(self.start(work))

    def start(self, work: Coroutine[Any, Any, Reply]) -> "asyncio.Task[Reply]":
        """The same without waiting for it."""

        async def alone() -> Reply:
            async with self._lock:
                return await work

        return self.keep(alone())

    def keep(self, work: Coroutine[Any, Any, Reply]) -> "asyncio.Task[Reply]":
        """Starts `work`, without the lock, and has `close` wait for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Marks an error as seen: its reader may be gone.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def close(self) -> None:
        """Waits for changes under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)
