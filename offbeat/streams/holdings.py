"""Which entries a worker process believes to hold. No I/O; used by the worker side of the Redis adapter."""

import contextlib
import time
from collections.abc import Iterable, Iterator

from offbeat.streams.base import Delivery, Stream

EntryKey = tuple[Stream, str]


class Holdings:
    """The process's side of ownership; Redis's side is the list of pending entries.

    They differ when a peer claimed an entry and this process has not heard of it yet, or when a reply got lost.
    """

    def __init__(self, max_hold_seconds: float) -> None:
        self._max_hold_seconds = max_hold_seconds
        self._taken_at: dict[EntryKey, float] = {}
        self._alone: EntryKey | None = None
        self._lost: set[EntryKey] = set()
        self._leaving: set[EntryKey] = set()

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Notes what was taken. Call it with nothing awaited before the caller's caller has them."""
        now = time.monotonic()
        for delivery in deliveries:
            self._taken_at[delivery.key] = now
            self._lost.discard(delivery.key)
            if delivery.alone:
                self._alone = delivery.key

    def forget(self, keys: Iterable[EntryKey]) -> None:
        """Notes what is not held any more: handed off or back, failed."""
        for key in keys:
            self._taken_at.pop(key, None)

    @property
    def keys(self) -> list[EntryKey]:
        """What is held and has not been held for too long."""
        oldest = time.monotonic() - self._max_hold_seconds
        return [key for key, at in self._taken_at.items() if at > oldest]

    @property
    def alone(self) -> bool:
        """Whether an entry is held that must run alone."""
        return self._alone in self.keys

    def handled(self, key: EntryKey) -> bool:
        """Whether the worker has the entry, or had it and was told to stop."""
        return key in self._taken_at or key in self._lost

    @contextlib.contextmanager
    def leaving(self, keys: Iterable[EntryKey]) -> Iterator[None]:
        """While entries are on their way out (the reply is awaited), they are beaten but never reported as lost."""
        going = set(keys)
        self._leaving |= going
        try:
            yield
        finally:
            self._leaving -= going

    def lose(self, stale: Iterable[EntryKey], rejected: Iterable[EntryKey]) -> set[EntryKey]:
        """The entries that the worker must stop working on; forgets them.

        `stale`: not held, or held for too long, when the heartbeat was sent. `rejected`: owned by somebody else, or
        gone; one that this process itself moved on meanwhile is not lost.
        """
        lost = {key for key in rejected if key in self._taken_at} | set(stale)
        lost -= self._leaving
        self.forget(lost)
        self._lost |= lost
        return lost
