"""How transfers of weights are taken up again, and what a final refusal means. Used by the client.

There is one retry layer for each call: unary calls use `rpc.call`, transfers use `Retry`.
"""

import asyncio
import logging
import random

import grpc

from offbeat.errors import Fenced, IntegrityError, OffbeatError, ServiceUnavailable, WeightsError

log = logging.getLogger(__name__)

FENCED_KEY = "offbeat-fenced"
"""Trailing metadata of a refusal whose cause is an older term."""

BROKEN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,  # by a server that stops; our own end raises asyncio's error
    grpc.StatusCode.INTERNAL,  # a stream that was reset
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Statuses after which a transfer is taken up again while there is time."""

HOPELESS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Statuses that no amount of waiting changes."""


class VersionGone(WeightsError):
    """The version does not exist, or not any more. A receiver goes on with the newest one."""


class Retry:
    """The deadline of a transfer and the growing pause between its attempts."""

    def __init__(self, what: str, address: str, deadline_seconds: float) -> None:
        self._what = what
        self._address = address
        self._total = deadline_seconds
        self._end = asyncio.get_running_loop().time() + deadline_seconds
        self._pause = 0.05
        self._refusal: grpc.aio.AioRpcError | None = None

    def left(self) -> float:
        """Seconds until the deadline; a call's timeout."""
        return max(0.001, self._end - asyncio.get_running_loop().time())

    def reset(self) -> None:
        """Makes the next pause short again: there was progress."""
        self._pause = 0.05

    async def after(self, error: grpc.aio.AioRpcError) -> None:
        """Pauses before the next attempt, or raises what `error` and the deadline mean."""
        expired = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if error.code() not in BROKEN and not expired:
            raise translated(error, self._what, self._address) from error
        if not expired:
            self._refusal = error
        if self.left() <= self._pause:
            # An attempt that merely ran out of time says less than the one before it.
            error = self._refusal or error
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise translated(error, self._what, self._address) from error
            raise ServiceUnavailable(
                f"{self._what} at {self._address} did not end within {self._total:g} s (last "
                f"answer: {error.code().name} {error.details() or ''}); is the service running?"
            ) from error
        full = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        level = logging.WARNING if full else logging.INFO
        log.log(level, "%s at %s: %s; going on", self._what, self._address, error.details())
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2.0, self._pause * 2)


def translated(error: grpc.aio.AioRpcError, what: str, address: str) -> OffbeatError:
    """The error of `offbeat.errors` that a final status stands for."""
    text = f"{what} at {address}: {error.details() or error.code().name}"
    if error.code() == grpc.StatusCode.DATA_LOSS:
        return IntegrityError(text)
    if error.code() == grpc.StatusCode.NOT_FOUND:
        return VersionGone(text)
    if any(key == FENCED_KEY for key, _ in error.trailing_metadata() or ()):
        return Fenced(text)
    return WeightsError(text)
