"""Connections to Redis that a cancelled task leaves at once. Used by `link`."""

import asyncio
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import (
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)


class _Cancellable:
    """Bounds sends and replies by `reply_seconds`, in place of the library's own `socket_timeout`.

    The library puts `asyncio.wait_for` around each send. That of Python 3.11 forgets a cancellation that comes when
    the send was just done, as most are at once: the task goes on as if nobody had told it to end.
    """

    def __init__(self, *, reply_seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._reply_seconds = reply_seconds

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        """See the library. Raises its `TimeoutError`."""
        try:
            async with asyncio.timeout(self._reply_seconds):
                await super().send_packed_command(*args, **options)  # type: ignore[misc]
        except TimeoutError:
            raise exceptions.TimeoutError(
                f"not sent within {self._reply_seconds:g} s: the connection does not drain"
            ) from None

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """See the library. Raises its `TimeoutError`."""
        try:
            async with asyncio.timeout(self._reply_seconds):
                return await super().read_response(*args, **options)  # type: ignore[misc]
        except TimeoutError:
            raise exceptions.TimeoutError(f"no reply within {self._reply_seconds:g} s") from None


class _Tcp(_Cancellable, Connection):
    pass


class _Tls(_Cancellable, SSLConnection):
    pass


class _Unix(_Cancellable, UnixDomainSocketConnection):
    pass


CLASSES: dict[Any, Any] = {SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}


def make_pool(url: str, *, reply_seconds: float, **settings: Any) -> BlockingConnectionPool:
    """A pool for the URL. Raises `ValueError` when it is none."""
    options = dict(parse_url(url))
    kind = CLASSES.get(options.pop("connection_class", Connection), _Tcp)
    return BlockingConnectionPool(
        connection_class=kind, reply_seconds=reply_seconds, **{**settings, **options}
    )
