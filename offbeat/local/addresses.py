"""Reads the files in which the processes of a run say where they listen (`offbeat.rpc.entry` writes them)."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ServiceUnavailable

REDIS = "redis"


@dataclass(frozen=True)
class Address:
    """Where one process listens."""

    service: str
    member_id: str
    address: str


def read_addresses(folder: Path) -> list[Address]:
    """All of a run's addresses, by service, each service's newest first."""
    found = []
    for path in sorted(_files(folder, ""), key=lambda path: -_modified(path)):
        service, _, member_id = path.name.partition(".")
        found.append(Address(service, member_id, path.read_text(encoding="utf-8").strip()))
    return sorted(found, key=lambda address: address.service)


def newest_address(folder: Path, service: str) -> str | None:
    """Address of the process of `service` that was started last; None when there is none yet."""
    files = _files(folder, f"{service}.")
    if not files:
        return None
    return max(files, key=_modified).read_text(encoding="utf-8").strip()


async def wait_for_address(
    folder: Path, service: str, *, seconds: float, check: Callable[[], None]
) -> str:
    """Waits until a process of `service` says where it listens. `check` raises when waiting is in vain.

    Raises `ServiceUnavailable` after `seconds`.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while (address := newest_address(folder, service)) is None:
        check()
        if loop.time() > end:
            raise ServiceUnavailable(
                f"the {service} service was started {seconds:g} s ago, and no address of it appeared in {folder}; "
                "its log says what it is doing"
            )
        await asyncio.sleep(0.05)
    return address


def write_redis_address(folder: Path, url: str) -> None:
    """Leaves the embedded server's URL where `offbeat status` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{REDIS}.embedded").write_text(url, encoding="utf-8")


def forget_addresses(folder: Path, services: tuple[str, ...]) -> None:
    """Removes what an earlier start of the run left behind."""
    for service in services:
        for path in _files(folder, f"{service}."):
            path.unlink(missing_ok=True)


def _files(folder: Path, prefix: str) -> list[Path]:
    if not folder.is_dir():
        return []
    # A name with a dot in front is a file that is still being written.
    names = [name for name in os.listdir(folder) if name.startswith(prefix) and name[0] != "."]
    return [folder / name for name in names]


def _modified(path: Path) -> float:
    return path.stat().st_mtime
