"""Ends of things, each with a deadline: a run that is done must not be held up by its last connection."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


async def end(task: "asyncio.Task[Any]", seconds: float) -> None:
    """Cancels a task. A cancellation can meet an operation that is just ending and get lost in it: it is repeated."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not task.done():
        if asyncio.get_running_loop().time() > deadline:
            log.error("%s did not end within %g s; going on without", task.get_name(), seconds)
            return
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)


async def within(seconds: float, what: str, work: Coroutine[Any, Any, None]) -> None:
    """Waits for the work, but no longer than that; an error of it is logged."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        log.error("%s did not end within %g s; going on without", what, seconds)
        task.cancel()
    elif task.exception() is not None:
        log.error("%s failed: %s", what, task.exception())
