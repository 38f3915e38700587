"""What the service's errors become on the wire. Used by the rpcs."""

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from offbeat.errors import Fenced, IntegrityError, ServiceUnavailable, StreamError, WeightsError
from offbeat.weights.chunks import NO_ROOM, NoRoom
from offbeat.weights.retry import FENCED_KEY, VersionGone
from services.checkpoint.store import UnknownVersion

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


class WrongRun(WeightsError):
    """The caller speaks of another run than the one that is served."""


class NotHere(WeightsError):
    """A relay was asked for what only the service of the run does."""


class LeaseOver(WeightsError):
    """A fetch took too long. One that is merely slow goes on under a new lease, if it still can."""


STATUS: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (UnknownVersion, grpc.StatusCode.NOT_FOUND),
    (VersionGone, grpc.StatusCode.NOT_FOUND),
    (Fenced, grpc.StatusCode.FAILED_PRECONDITION),
    (WrongRun, grpc.StatusCode.FAILED_PRECONDITION),
    (NotHere, grpc.StatusCode.FAILED_PRECONDITION),
    (IntegrityError, grpc.StatusCode.DATA_LOSS),
    (NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ServiceUnavailable, grpc.StatusCode.UNAVAILABLE),
    (StreamError, grpc.StatusCode.UNAVAILABLE),
    (LeaseOver, grpc.StatusCode.ABORTED),
    (WeightsError, grpc.StatusCode.INVALID_ARGUMENT),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),
)
"""What an error becomes on the wire; the first that fits."""
REFUSALS = tuple(kind for kind, _ in STATUS)


def answering(handler: Handler) -> Handler:
    """Turns the errors that a handler raises on purpose into statuses."""

    @functools.wraps(handler)
    async def answer(self: Any, request: Any, context: Context) -> Any:
        try:
            return await handler(self, request, context)
        except REFUSALS as error:
            code = next(code for kind, code in STATUS if isinstance(error, kind))
            self.counters.refusals[code.name] += 1
            log.info("%s: %s (%s)", handler.__name__, error, code.name)
            trailing = ((FENCED_KEY, "1"),) if isinstance(error, Fenced) else ()
            await context.abort(code, str(error), trailing)
        except OSError as error:
            full = error.errno in NO_ROOM
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if full else grpc.StatusCode.INTERNAL
            self.counters.refusals[code.name] += 1
            hint = "free some room there" if full else "look at the disk"
            text = f"can't use {self.directory}: {error.strerror}; {hint}"
            log.error("%s: %s (%s)", handler.__name__, text, code.name)
            await context.abort(code, text)

    return answer  # type: ignore[return-value]
