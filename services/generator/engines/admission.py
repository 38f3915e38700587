"""Decides which requests may be inside the engine: a number of slots, and a gate that a weight update closes.

Used by `base.Engine`. Requests wait here and not in the engine's own queue, because a request takes over what depends
on the version (the salt of the prefix cache) when it enters.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Admission:
    """Slots and a gate. Freed slots go to waiting requests in the order of their arrival."""

    def __init__(self, slots: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._gate = asyncio.Event()
        self._gate.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.running = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Holds a slot inside the block."""
        async with self._slots:
            # No await between the gate and the count: whoever passes the gate is counted when it closes.
            await self._gate.wait()
            self.running += 1
            self._empty.clear()
            try:
                yield
            finally:
                self.running -= 1
                if self.running == 0:
                    self._empty.set()

    async def close(self, *, drain: bool) -> None:
        """Lets nobody in any more; with `drain`, returns once nobody is inside."""
        self._gate.clear()
        if not drain:
            return
        try:
            await self._empty.wait()
        except asyncio.CancelledError:
            self._gate.set()
            raise

    def open(self) -> None:
        """Lets waiting requests in."""
        self._gate.set()
