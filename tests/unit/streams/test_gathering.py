"""Calls that become one: what is sent together, what each caller gets."""

import asyncio

import pytest

from offbeat.streams.gathering import Gathering


class Sent:
    """A far end that answers when told to, and remembers its batches."""

    def __init__(self, max_items: int = 3, max_bytes: int = 100) -> None:
        self.batches: list[list[bytes]] = []
        self.answer = asyncio.Event()
        self.error: Exception | None = None
        self.calls = Gathering(self._send, size_of=len, max_items=max_items, max_bytes=max_bytes)

    async def _send(self, items: list[bytes]) -> list[int]:
        self.batches.append(items)
        await self.answer.wait()
        if self.error is not None:
            raise self.error
        return [int(item) for item in items]

    def add(self, *items: bytes) -> "list[asyncio.Task[int]]":
        return [asyncio.create_task(self.calls.add(item)) for item in items]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_comes_while_a_batch_is_under_way_goes_in_the_next_one():
    far = Sent()
    first = far.add(b"0")
    await settle()
    later = far.add(b"1", b"2", b"3", b"4")
    await settle()
    assert far.batches == [[b"0"]]
    far.answer.set()
    assert await asyncio.gather(*first, *later) == [0, 1, 2, 3, 4]
    assert far.batches == [[b"0"], [b"1", b"2", b"3"], [b"4"]]


async def test_a_batch_holds_no_more_bytes_than_allowed_but_one_item_of_any_size():
    far = Sent(max_bytes=4)
    far.answer.set()
    items = [b"000001", b"01", b"02", b"3"]
    assert await asyncio.gather(*far.add(*items)) == [1, 1, 2, 3]
    assert far.batches == [[b"000001"], [b"01", b"02"], [b"3"]]


async def test_an_error_reaches_every_caller_of_its_batch_and_no_other():
    far = Sent()
    failing = far.add(b"1", b"2")
    await settle()
    far.error = ValueError("away")
    far.answer.set()
    found = await asyncio.gather(*failing, return_exceptions=True)
    assert [str(error) for error in found] == ["away", "away"]
    far.error = None
    assert await far.calls.add(b"7") == 7


async def test_who_is_cancelled_before_its_batch_is_sent_takes_its_item_back():
    far = Sent()
    running = far.add(b"0")
    await settle()
    gone, kept = far.add(b"1", b"2")
    await settle()
    gone.cancel()
    far.answer.set()
    assert await kept == 2
    assert far.batches == [[b"0"], [b"2"]]
    with pytest.raises(asyncio.CancelledError):
        await gone
    await asyncio.gather(*running)
