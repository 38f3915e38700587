"""The versions' high-water mark in Redis, which the checkpoint service raises before it commits a version.

It is a second memory beside the service's own: a service that lost its disk still issues no number twice.
"""

from offbeat.streams.keys import Keys
from offbeat.streams.link import Link


class RedisVersionMark:
    """One run's mark. Both calls wait for a Redis that is away, for `patience_seconds`, then raise
    `ServiceUnavailable`."""

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        patience_seconds: float = 30.0,
        password_file: str | None = None,
    ) -> None:
        self._key = Keys(run_id).version
        self._term_key = Keys(run_id).term
        self._link = Link(url, outage_seconds=patience_seconds, password_file=password_file)

    async def raise_version_high_water(self, version: int) -> int:
        """Raises the mark to `version` if it is lower; returns the mark."""
        what = "raising the versions' high-water mark"
        return int(await self._link.run(what, "raise_version", [self._key], [version]))

    async def version_high_water(self) -> int:
        """The mark; 0 when there is none."""
        return int(await self._link.ask("the versions' high-water mark", "get", self._key) or 0)

    async def newest_term(self) -> int:
        """The newest term that a learner began; 0 when there is none."""
        return int(await self._link.ask("the newest term", "hget", self._term_key, "term") or 0)

    async def close(self) -> None:
        """Closes the connections."""
        await self._link.close()
