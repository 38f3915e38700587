"""An event loop in a thread of its own: streams, publishing and gRPC go on while the main thread trains."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

CANCEL_SECONDS = 5.0
"""Given to what still runs when the process ends."""

Result = TypeVar("Result")


class Background:
    """Runs coroutines for a thread that does not await. Use as a context manager."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="background", daemon=True)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def __enter__(self) -> "Background":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs the coroutine there and waits for its result. The coroutine bears its own deadline."""
        return self.start(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Runs the coroutine there and returns at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
