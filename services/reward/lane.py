"""A thread of its own for each synchronous reward function, so that heartbeats and gRPC go on meanwhile."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Outcome = tuple[Any, BaseException | None]


class Overdue(Exception):
    """A call did not return in time. Its thread still runs: Python can't stop it."""


class Blocked(Exception):
    """A call could not start, because an earlier one is overdue."""


@dataclass(frozen=True)
class _Call:
    function: Callable[[], Any]
    started: "asyncio.Future[None]"
    done: "asyncio.Future[Outcome]"


class Lane:
    """Runs calls one after the other in one daemon thread: a function need not be thread-safe, and an overdue one
    does not keep the process from ending. Used from one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: asyncio.Future[None] | None = None

    async def call(self, function: Callable[[], Any], timeout_seconds: float | None) -> Any:
        """What `function` returns or raises.

        Raises `Overdue` when it took longer, counted from its start, and `Blocked` when it was never started.
        """
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        if self._overdue is None:
            self._overdue = loop.create_future()
        call = _Call(function, loop.create_future(), loop.create_future())
        self._calls.put(call)
        try:
            await asyncio.wait({call.started, self._overdue}, return_when=asyncio.FIRST_COMPLETED)
            if not call.started.done():
                raise Blocked
            async with asyncio.timeout(timeout_seconds):
                result, error = await asyncio.shield(call.done)
        except TimeoutError:
            self._mark_overdue(call)
            raise Overdue from None
        finally:
            # Not started yet, and nobody waits for it any more: the thread passes over it.
            call.started.cancel()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Ends the thread once its call under way returns."""
        self._calls.put(None)

    def _mark_overdue(self, call: _Call) -> None:
        assert self._overdue is not None
        if not self._overdue.done():
            self._overdue.set_result(None)
        call.done.add_done_callback(lambda _: setattr(self, "_overdue", None))

    def _work(self) -> None:
        # The loop is closed when the process ends during a call.
        with contextlib.suppress(RuntimeError):
            while (call := self._calls.get()) is not None:
                if call.started.cancelled():
                    continue
                loop = call.started.get_loop()
                loop.call_soon_threadsafe(_settle, call.started, None)
                loop.call_soon_threadsafe(_settle, call.done, _outcome(call.function))


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _outcome(function: Callable[[], Any]) -> Outcome:
    """Result or error, as a value: a future refuses StopIteration, and SystemExit would end the process."""
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything; `call` raises it again
        return None, error
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward function is its failure, not our end
        return None, RuntimeError(f"{type(error).__name__}: {error}")
