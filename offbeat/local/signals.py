"""Runs a coroutine so that Ctrl-C, SIGTERM and a closed terminal end it cleanly. Used by the command line."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal ended the coroutine, after a clean stop. Not an error, hence no `Exception`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def run_until_signalled(
    main: Coroutine[Any, Any, Result], on_signal: Callable[[int], None]
) -> Result:
    """Runs `main`; the first signal cancels it, and what it does in `finally` is waited for.

    The second signal ends this process at once: its children die with it. Raises `Interrupted` after the first.
    """
    received: list[int] = []

    async def guarded() -> Result | None:
        task = asyncio.current_task()
        assert task is not None

        def handle(number: int) -> None:
            if received:
                os._exit(128 + number)
            received.append(number)
            on_signal(number)
            task.cancel()

        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
                asyncio.get_running_loop().add_signal_handler(number, handle, number)
        try:
            return await main
        except asyncio.CancelledError:
            if not received:
                raise
            return None

    result = asyncio.run(guarded())
    if received:
        raise Interrupted(received[0])
    return result  # type: ignore[return-value]  # None only after a signal
