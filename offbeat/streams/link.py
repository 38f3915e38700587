"""A process's connection to the run's Redis: the scripts, the one retry layer, and what an outage means.

Used by the Redis adapter's worker and learner sides. The client library's own retries are off everywhere: they would
send a command again whose reply was lost, and not every command may be done twice. Scripts that may are sent again
from here.
"""

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from offbeat.config.service import RedisSettings
from offbeat.errors import BacklogFull, Fenced, OffbeatError, ServiceUnavailable, StreamError
from offbeat.streams.connection import make_pool

log = logging.getLogger(__name__)

CONNECT_SECONDS = 3.0
REPLY_SECONDS = 10.0
"""A server that takes longer over a command counts as gone."""
BLOCK_SECONDS = 5.0
"""Longest single blocking read; a longer wait is several of them."""

CONNECTIONS = 8
"""Of one client. Hundreds of groups may end at once; Redis works them off one by one anyway."""

PENDING_LIMIT = 10_000
"""More than one consumer ever holds."""

Argument = str | bytes | int


class NoGroup(OffbeatError):
    """A stream or its consumer group does not exist: before the learner's first start, or in an emptied Redis."""


class Unreachable(OffbeatError):
    """Redis did not answer; whether it did what it was asked is unknown."""


def connect(
    url: str, *, reply_seconds: float = REPLY_SECONDS, password_file: str | None = None
) -> Redis:
    """A client that never sends a command twice by itself. It connects when it is first used.

    Raises `StreamError` when the URL is none, or the password's file can't be read.
    """
    login = {} if password_file is None else {"password": _password(password_file)}
    try:
        # A pool that hands out no more connections than it has makes callers queue; the default one raises.
        pool = make_pool(
            url,
            reply_seconds=reply_seconds,
            max_connections=CONNECTIONS,
            timeout=REPLY_SECONDS,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=None,
            socket_keepalive=True,
            protocol=2,
            **login,
        )
        return Redis.from_pool(pool)
    except ValueError as error:
        raise StreamError(
            f"redis.url: expected redis://HOST:PORT/DB, found {address(url)}: {error}"
        ) from error


def _password(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StreamError(
            f"redis.password_file: expected a file with Redis's password, found {path}: {error.strerror}; "
            "mount the secret there, or correct the path"
        ) from error


def address(url: str) -> str:
    """The URL without its password, fit for logs and errors."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def gap_ms(settings: RedisSettings) -> int:
    """A silence of all that is longer than this was Redis's or the network's; milliseconds, see `may_claim`.

    An entry is beaten at least once in a heartbeat's time, so a shorter one makes nobody idle for long enough.
    """
    longest = settings.min_idle_seconds - 2 * settings.beat_seconds
    return int(1000 * max(longest, settings.min_idle_seconds / 2))


@cache
def script(name: str) -> str:
    """Text of a script: its first line (the flags), then what all scripts share, then the rest."""
    folder = resources.files("offbeat.streams") / "scripts"
    flags, _, body = (folder / f"{name}.lua").read_text().partition("\n")
    return f"{flags}\n{(folder / 'common.lua').read_text()}\n{body}"


async def wait_for_redis(url: str, deadline_seconds: float) -> None:
    """Returns once Redis answers and has loaded its data.

    Raises `ServiceUnavailable` after the deadline, `StreamError` when it refuses this client.
    """
    link = Link(url, outage_seconds=deadline_seconds)
    try:
        await link.ask("answering a ping", "ping", patience=deadline_seconds)
    finally:
        await link.close()


class Link:
    """Runs scripts and commands on one Redis. Safe for concurrent coroutines of one event loop."""

    def __init__(
        self, url: str, *, outage_seconds: float, password_file: str | None = None
    ) -> None:
        self.address = address(url)
        self.client = connect(url, password_file=password_file)
        # A blocked read occupies its connection and may take longer than any reply, so it has a client of its own.
        self._blocking = connect(
            url, reply_seconds=BLOCK_SECONDS + REPLY_SECONDS, password_file=password_file
        )
        self._scripts: dict[str, Any] = {}
        self._outage_limit = outage_seconds
        self._failing_since: float | None = None
        self.outages = 0
        """How often Redis did not answer after it had."""
        self.last_outage = (0.0, 0.0)
        """Length of the last outage that ended, and when it ended (monotonic time); seconds."""

    @property
    def outage(self) -> float:
        """Seconds since the first of the failures without an answer in between; 0 when Redis answers."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    @property
    def given_up(self) -> bool:
        """Whether Redis has been silent for longer than the process should wait."""
        return self.outage > self._outage_limit

    async def run(
        self,
        what: str,
        name: str,
        keys: Sequence[str],
        args: Sequence[Argument],
        *,
        patience: float | None = None,
    ) -> Any:
        """Runs a script that may be run twice, again and again until it answers.

        Raises `ServiceUnavailable` after `patience` seconds (default: the longest outage that is waited for), and
        `Fenced`, `BacklogFull`, `NoGroup` or `StreamError` by what Redis answered. `what` completes "Redis is ...".
        """
        command = self._script(name)
        return await self._retried(what, lambda: command(keys=keys, args=args), patience)

    async def ask(
        self, what: str, name: str, *args: Any, patience: float | None = None, **kw: Any
    ) -> Any:
        """Calls a reading method of the client, as `run` does."""
        method = getattr(self.client, name)
        return await self._retried(what, lambda: method(*args, **kw), patience)

    async def once(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Runs a script once. Raises as `run` does, and `Unreachable` instead of `ServiceUnavailable`."""
        command = self._script(name)
        return await self._attempt(lambda: command(keys=keys, args=args))

    def _script(self, name: str) -> Any:
        """A script that can be called. Registering one hashes its text, which costs more than a call of it."""
        if name not in self._scripts:
            self._scripts[name] = self.client.register_script(script(name))
        return self._scripts[name]

    async def _retried(self, what: str, call: Any, patience: float | None) -> Any:
        patience = self._outage_limit if patience is None else patience
        start, delay = time.monotonic(), 0.05
        while True:
            try:
                return await self._attempt(call)
            except Unreachable as error:
                if time.monotonic() + delay - start > patience:
                    raise self.unavailable(what, error) from error
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(1.0, delay * 2)

    def unavailable(self, what: str, error: Exception) -> ServiceUnavailable:
        """The error of a wait that was given up."""
        return ServiceUnavailable(
            f"Redis at {self.address} has not answered for {self.outage:.1f} s (asked for: {what}; {error}); "
            "is it running, and is redis.url right?"
        )

    async def _attempt(self, call: Any) -> Any:
        started = time.monotonic()
        try:
            reply = await call()
        except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
            raise StreamError(
                f"Redis at {self.address} refuses this client: {error}; give user and password in redis.url, "
                "or redis.password_file"
            ) from error
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            raise self._failed(started, error) from error
        except exceptions.RedisError as error:
            raise self._translated(started, error) from error
        self._answered()
        return reply

    def _failed(self, started: float, error: Exception) -> Unreachable:
        if self._failing_since is None:
            self._failing_since = started
            self.outages += 1
            log.warning("Redis at %s does not answer, trying again: %s", self.address, error)
        return Unreachable(str(error) or type(error).__name__)

    def _answered(self) -> None:
        if self._failing_since is not None:
            self.last_outage = (self.outage, time.monotonic())
            log.warning("Redis at %s answers again after %.1f s", self.address, self.last_outage[0])
            self._failing_since = None

    def _translated(self, started: float, error: exceptions.RedisError) -> OffbeatError:
        text = str(error)
        if isinstance(error, exceptions.ReadOnlyError | exceptions.ClusterDownError):
            return self._failed(started, error)  # a failover is under way
        self._answered()
        if "FENCED" in text:
            term, _, learner = text.partition("FENCED ")[2].partition(" ")
            by = f" (learner {learner})" if learner else ""
            return Fenced(
                f"term {term}{by} began after this one; stop this learner, the newer one goes on"
            )
        if "NOGROUP" in text or "no such key" in text:
            return NoGroup(text)
        if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in text:
            return BacklogFull(
                f"Redis at {self.address} is at its maxmemory and takes no new prompt tasks; they are issued as soon "
                "as others were trained on. If this stays so, raise maxmemory"
            )
        return StreamError(f"Redis at {self.address} answered an error: {text}")

    # --- reading, one attempt each; they raise as `once` does -----------------------------------------------------

    async def pending_of(self, stream: str, group: str, consumer: str) -> list[tuple[str, int]]:
        """(entry id, deliveries) of what a consumer holds."""
        rows = await self._attempt(
            lambda: self.client.xpending_range(stream, group, "-", "+", PENDING_LIMIT, consumer)
        )
        return [(row["message_id"].decode(), row["times_delivered"]) for row in rows]

    async def entry(self, stream: str, entry_id: str) -> dict[bytes, bytes] | None:
        """Fields of an entry; None when it is gone."""
        found = await self._attempt(lambda: self.client.xrange(stream, entry_id, entry_id))
        return found[0][1] if found else None

    async def hash_field(self, key: str, field: str) -> bytes | None:
        """A field of a hash."""
        value: bytes | None = await self._attempt(lambda: self.client.hget(key, field))
        return value

    async def wait_for_entries(self, after: Mapping[str, str], seconds: float) -> None:
        """Returns when one of the streams (key -> an entry id) gets a newer entry, or after `seconds`.

        It reads no group, so it takes nothing: a lost reply loses nothing. When Redis is away it notes that and waits.
        """
        block = int(1000 * min(seconds, BLOCK_SECONDS))
        if block <= 0:
            return
        start = time.monotonic()
        try:
            await self._blocking.xread(dict[Any, Any](after), count=1, block=block)
        except exceptions.RedisError as error:
            # The next command says what is wrong. If it can't, since Redis is back by then, it may have come back with
            # less than it had.
            if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError):
                self._failed(start, error)
            await asyncio.sleep(max(0.0, min(seconds, 0.1) - (time.monotonic() - start)))

    async def close(self) -> None:
        """Closes the connections."""
        await self.client.aclose()
        await self._blocking.aclose()


def fields_of(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """[field, value, ...] of a script's reply -> a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))
