"""Whether a Redis can carry a run: version, role, eviction policy, memory, persistence. Used when a learner starts."""

import logging
from collections.abc import Mapping

from offbeat.errors import StreamError

log = logging.getLogger(__name__)

MIB = 1024**2
OLDEST = (7, 0)


def check_server(
    address: str, info: Mapping[str, object], *, needed_bytes: int, own_bytes: int
) -> None:
    """Raises `StreamError` when the server of this INFO reply can't be used; warns when it may lose data.

    `own_bytes` is what the run's streams hold there already: a resumed run needs that memory only once.
    """
    _check_version(address, info)
    if info.get("role") not in {None, "master"}:
        raise StreamError(
            f"Redis at {address}: expected a primary, found a {info['role']}, which can't be written to; "
            "give the primary's address in redis.url"
        )
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction" and not policy.startswith("volatile-"):
        raise StreamError(
            f"Redis at {address}: expected maxmemory-policy noeviction (or volatile-*), found {policy}, which evicts "
            "whole streams silently; run: CONFIG SET maxmemory-policy noeviction"
        )
    _check_memory(address, info, needed_bytes, own_bytes)
    if not info.get("aof_enabled"):
        log.warning(
            "Redis at %s writes no append-only file: when it restarts, samples under way are lost and generated again. "
            "To keep them: CONFIG SET appendonly yes",
            address,
        )


def _check_version(address: str, info: Mapping[str, object]) -> None:
    # Valkey reports the Redis version that it is compatible with.
    found = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in found.split(".")[:2] if part.isdecimal()) < OLDEST:
        raise StreamError(
            f"Redis at {address}: expected version 7.0 or newer (or any Valkey), found {found}; use a newer server"
        )


def _check_memory(
    address: str, info: Mapping[str, object], needed_bytes: int, own_bytes: int
) -> None:
    limit = _number(info, "maxmemory")
    if limit == 0:
        return
    free = limit - _number(info, "used_memory") + own_bytes
    if free < needed_bytes:
        raise StreamError(
            f"Redis at {address}: expected {needed_bytes / MIB:.0f} MiB for the samples under way, found "
            f"{free / MIB:.0f} MiB free of maxmemory {limit / MIB:.0f} MiB; raise maxmemory (or "
            "redis.embedded_max_memory_mb), or lower max_lag, prompts per step, or the steps between checkpoints"
        )


def _number(info: Mapping[str, object], name: str) -> int:
    return int(str(info.get(name, 0)))
