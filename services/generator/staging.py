"""Keeps the weights that are wanted next staged on this host, while the generator goes on serving.

Watches the checkpoint service, fetches what is newest (or what the worker asked for), and tells when it is there.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from offbeat.errors import IntegrityError, ServiceUnavailable, WeightsError
from offbeat.weights.chunks import NoRoom
from offbeat.weights.client import CheckpointClient
from offbeat.weights.staged import StagedWeights

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
FETCH_SECONDS = 1800.0
RETRY_SECONDS = 1.0
PREFIX = "offbeat-staging-"


class Merger(Protocol):
    """Makes whole weights of an adapter; see `merging`."""

    @property
    def merged_bytes(self) -> int:
        """Room that the whole weights take."""

    def merge(self, weights: StagedWeights) -> StagedWeights:
        """The whole weights, staged."""


@dataclass(frozen=True)
class StageTimes:
    """What it took to have the last claimed version at hand, in seconds."""

    fetch_seconds: float = 0.0
    """From the request to the verified file."""
    staged_seconds: float = 0.0
    """It lay ready, and the generator was not yet free to load it."""


class Stager:
    """Newest version announced, and the staged one. `on_change` is called when either changes."""

    def __init__(
        self,
        client: CheckpointClient,
        folders: "StagingFolders",
        on_change: Callable[[], None],
        *,
        merger: Merger | None = None,
    ) -> None:
        self._client = client
        self._merger = merger
        self._folders = folders
        self._on_change = on_change
        self._wake = asyncio.Event()
        self._sizes: dict[int, int] = {}
        self._gone: set[int] = set()
        self._pinned = 0
        self._held = 0
        self._fetch_seconds = 0.0
        self._staged_at = 0.0
        self.announced = 0
        self.staged: StagedWeights | None = None
        self.times = StageTimes()

    @property
    def target(self) -> int:
        """The version that should be staged or held."""
        return self._pinned or self.announced

    def pin(self, version: int) -> None:
        """Asks for one version instead of the newest; 0 asks for the newest again."""
        if version != self._pinned:
            self._pinned = version
            self._wake.set()

    def is_gone(self, version: int) -> bool:
        """Whether the checkpoint service said that it has the version no more."""
        return version in self._gone

    def claim(self) -> StagedWeights:
        """Hands the staged weights over: their file is the caller's to discard. The next version may be fetched now."""
        assert self.staged is not None
        weights, self.staged = self.staged, None
        self._held = weights.version
        self.times = StageTimes(self._fetch_seconds, time.monotonic() - self._staged_at)
        self._wake.set()
        return weights

    def drop(self) -> None:
        """Removes the staged weights."""
        if self.staged is not None:
            self.staged.discard()
            self.staged = None

    async def fetch(self, version: int, *, full: bool = True) -> StagedWeights:
        """Fetches a version now, in full or as is quickest; merges an adapter. Raises what `stage` and `merge` do."""
        size = self._sizes.get(version, 0)
        if self._merger is not None:
            size = max(size, self._merger.merged_bytes)
        folder = self._folders.choose(size)
        weights = await self._client.stage(
            folder, version=version, full=full, deadline_seconds=FETCH_SECONDS
        )
        if self._merger is None:
            return weights
        return await asyncio.to_thread(self._merger.merge, weights)

    async def watch(self) -> None:
        """Listens for new versions until cancelled. Raises `WeightsError` when the service refuses that."""
        async for news in self._client.watch():
            self._sizes = {news.version: news.total_bytes}
            self.announced = news.version
            self._wake.set()
            self._on_change()

    async def stage_wanted(self) -> None:
        """Keeps the target staged until cancelled. Raises `NoRoom` when the disk is full."""
        while True:
            version = self.target
            there = self.staged.version if self.staged is not None else None
            if version in {0, self._held, there} or version in self._gone:
                await self._wake.wait()
                self._wake.clear()
            elif not await self._stage(version):
                await asyncio.sleep(RETRY_SECONDS)

    async def _stage(self, version: int) -> bool:
        """Stages a version; False when it should be tried again later."""
        self.drop()
        began = time.monotonic()
        try:
            self.staged = await self.fetch(version, full=False)
        except NoRoom:
            raise
        except (IntegrityError, ServiceUnavailable) as error:
            log.error("version %d can't be fetched: %s", version, error)
            return False
        except WeightsError as error:
            log.warning("version %d can't be fetched: %s", version, error)
            if version == self.target and version == self.announced:
                return False
            # An older one that retention has removed; the newest will do, or the worker decides.
            self._gone.add(version)
        self._staged_at = time.monotonic()
        self._fetch_seconds = self._staged_at - began
        self._on_change()
        return True


class StagingFolders:
    """Where weights are staged: the recipe's folder, or shared memory when it has room, or the run's folder.

    Each process has a folder of its own. What a killed one has left is removed at the next start.
    """

    def __init__(self, setting: str | None, run_folder: Path) -> None:
        places = [Path(setting)] if setting else [SHARED_MEMORY, run_folder / "staging"]
        self._folders = [place / f"{PREFIX}{os.getpid()}" for place in places]
        for place in places:
            _remove_leftovers(place)

    def choose(self, size: int) -> Path:
        """The first folder with room for `size` bytes and as much again, else the last one."""
        for folder in self._folders[:-1]:
            place = folder.parent
            usable = place.is_dir() and os.access(place, os.W_OK)
            if usable and shutil.disk_usage(place).free > 2 * size:
                return folder
        return self._folders[-1]

    def remove(self) -> None:
        """Removes this process's folders."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(place: Path) -> None:
    for folder in place.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX)
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
