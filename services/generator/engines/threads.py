"""Blocking work that may take minutes, such as starting an engine."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_daemon_thread(function: Callable[[], Result]) -> Result:
    """What `function` returns or raises. Unlike `asyncio.to_thread`, the process may end while it still runs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def work() -> None:
        set_outcome: Callable[[Any], None] = done.set_result
        outcome: Any
        try:
            outcome = function()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who waits for it
            outcome, set_outcome = error, done.set_exception
        # The loop is closed when the process is ending.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, set_outcome, outcome)

    threading.Thread(target=work, name="start-engine", daemon=True).start()
    return await done
