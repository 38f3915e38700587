"""Channels to other services, and the one place that retries a unary call."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from offbeat.errors import ServiceUnavailable
from offbeat.rpc import options

RETRIED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,  # by a server that stops; our own end raises asyncio's error
}
"""Statuses after which a call is made again. A deadline that passed is not among them: the total is spent."""

Reply = TypeVar("Reply")


def connect(address: str) -> grpc.aio.Channel:
    """A channel to HOST:PORT (or dns:///NAME:PORT, used round robin). It connects when it is first used."""
    return grpc.aio.insecure_channel(address, options=options.CLIENT)


async def call(
    what: str,
    address: str,
    attempt: Callable[[float], Awaitable[Reply]],
    *,
    deadline_seconds: float,
    attempt_seconds: float | None = None,
) -> Reply:
    """Makes an idempotent unary call, again and again until it answers or the total deadline passes.

    `attempt` gets the seconds that it may take, e.g. ``lambda t: stub.GetStatus(request, timeout=t)``. Raises
    `ServiceUnavailable` naming `what` and `address`; other statuses are raised as they are (`grpc.aio.AioRpcError`).
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_seconds
    delay = 0.05
    while True:
        left = end - loop.time()
        try:
            return await attempt(max(0.001, min(left, attempt_seconds or left)))
        except grpc.aio.AioRpcError as error:
            expired = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if error.code() not in RETRIED and not expired:
                raise
            left = end - loop.time()
            if left <= delay:
                raise ServiceUnavailable(
                    f"{what} at {address} did not answer within {deadline_seconds:g} s "
                    f"(last answer: {error.code().name} {error.details() or ''}); is the service running there?"
                ) from error
        await asyncio.sleep(delay * random.uniform(0.5, 1.0))
        delay = min(2.0, delay * 2)
