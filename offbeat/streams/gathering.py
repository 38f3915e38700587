"""Calls that come close together become one. Used by the worker side of the Redis adapter for its hand-offs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class Gathering(Generic[Item, Outcome]):
    """Sends items in batches: whatever was added while the batch before was under way.

    So nothing waits for others to come along, and the busier it gets the fewer calls are made for each item. `send`
    gets items, in the order in which they were added, and returns an outcome for each. A batch has at most
    `max_items`, and no more than `max_bytes` by `size_of` unless a single item is larger.
    """

    def __init__(
        self,
        send: Callable[[list[Item]], Awaitable[list[Outcome]]],
        *,
        size_of: Callable[[Item], int],
        max_items: int,
        max_bytes: int,
    ) -> None:
        self._send = send
        self._size_of = size_of
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._waiting: list[tuple[Item, asyncio.Future[Outcome]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def add(self, item: Item) -> Outcome:
        """The item's outcome. Raises what `send` raised for its batch; a caller that is cancelled before its batch is
        sent takes its item back."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="sending")
        return await future

    async def _send_all(self) -> None:
        try:
            while batch := self._next_batch():
                await self._send_batch(batch)
        finally:
            self._sender = None
            for _, future in self._waiting:  # only when this task was cancelled
                future.cancel()

    async def _send_batch(self, batch: list[tuple[Item, "asyncio.Future[Outcome]"]]) -> None:
        try:
            outcomes = await self._send([item for item, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if not future.done():
                future.set_result(outcome)

    def _next_batch(self) -> list[tuple[Item, "asyncio.Future[Outcome]"]]:
        waiting = [(item, future) for item, future in self._waiting if not future.done()]
        size = count = 0
        for item, _ in waiting[: self._max_items]:
            size += self._size_of(item)
            if count and size > self._max_bytes:
                break
            count += 1
        self._waiting = waiting[count:]
        return waiting[:count]
