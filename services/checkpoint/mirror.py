"""Makes a checkpoint service a relay: it mirrors the versions of another one, and serves them. Used by the server.

New versions are fetched as they are announced, as deltas where the relay holds the version before; deltas are handed
on to receivers as they came. An older version is fetched when somebody asks for it.
"""

import asyncio
import logging

from offbeat.errors import IntegrityError, OffbeatError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.client import CheckpointClient
from offbeat.weights.incoming import Delta, FullFile
from services.checkpoint.publishing import Publisher
from services.checkpoint.store import StoredVersion, UnknownVersion, VersionStore

log = logging.getLogger(__name__)

FETCH_SECONDS = 1800.0
RETRY_SECONDS = 1.0


class Mirror:
    """Keeps a store like that of the service behind `client`."""

    def __init__(
        self, client: CheckpointClient, store: VersionStore, publisher: Publisher, *, deltas: bool
    ) -> None:
        self._client = client
        self._store = store
        self._publisher = publisher
        self._deltas = deltas
        self._fetching: dict[int, asyncio.Task[StoredVersion]] = {}

    @property
    def upstream(self) -> str:
        """HOST:PORT of the service that is mirrored."""
        return self._client.address

    async def run(self) -> None:
        """Fetches each new version until cancelled; ones that are replaced meanwhile are left out."""
        newest = 0
        changed = asyncio.Event()

        async def listen() -> None:
            nonlocal newest
            latest = self._store.latest()
            async for news in self._client.watch(latest.version if latest is not None else 0):
                newest = news.version
                changed.set()

        listening = asyncio.create_task(listen())
        try:
            while True:
                waiting = asyncio.create_task(changed.wait())
                await asyncio.wait({waiting, listening}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if listening.done():
                    listening.result()
                changed.clear()
                if not await self._try_to_fetch(newest):
                    await asyncio.sleep(RETRY_SECONDS)
                    changed.set()
        finally:
            listening.cancel()

    async def get(self, version: int) -> StoredVersion:
        """A version whose bytes are here, fetched now if need be; 0: the newest of the upstream.

        Raises what `CheckpointClient.receive` raises.
        """
        try:
            return self._store.get_available(version)
        except UnknownVersion:
            return await self._fetch_once(version)

    async def applied(self, request: checkpoint.AppliedRequest) -> None:
        """Tells the upstream what a receiver holds; that it can't be told is no fault of the receiver."""
        try:
            await self._client.forward_applied(request, deadline_seconds=10.0)
        except OffbeatError as error:
            log.warning("not told to %s: %s", self.upstream, error)

    async def close(self) -> None:
        """Ends fetches under way, and the connection."""
        for task in list(self._fetching.values()):
            task.cancel()
            await asyncio.wait([task])
        await self._client.close()

    async def _try_to_fetch(self, version: int) -> bool:
        try:
            await self.get(version)
        except (OffbeatError, UnknownVersion) as error:
            log.warning("version %d can't be mirrored: %s", version, error)
            return False
        return True

    async def _fetch_once(self, version: int) -> StoredVersion:
        task = self._fetching.get(version)
        if task is None:
            task = self._fetching[version] = asyncio.create_task(self._fetch(version))
            task.add_done_callback(lambda done: self._fetching.pop(version, None))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _fetch(self, version: int) -> StoredVersion:
        latest = self._store.latest() if self._deltas else None
        base = latest.manifest if latest is not None else None
        folder = await asyncio.to_thread(self._store.begin_publish)
        try:
            received = await self._client.receive(
                folder, version=version, base=base, deadline_seconds=FETCH_SECONDS
            )
            assert isinstance(received, FullFile | Delta)  # a mapped file is not asked for
            try:
                if isinstance(received, Delta) and (
                    base is None or received.base_version != base.version
                ):
                    raise IntegrityError(
                        f"a delta to version {received.base_version}, not to the one held"
                    )
                return await self._publisher.adopt(folder, received)
            except (IntegrityError, UnknownVersion) as error:  # unknown: the base went meanwhile
                if not isinstance(received, Delta):
                    raise
                log.warning("%s; fetching version %d in full", error, received.manifest.version)
                received = await self._client.receive(
                    folder, version=received.manifest.version, deadline_seconds=FETCH_SECONDS
                )
                assert isinstance(received, FullFile)
                return await self._publisher.adopt(folder, received)
        finally:
            await asyncio.to_thread(self._store.end_publish, folder)
