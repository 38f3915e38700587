"""The sample streams on Redis, as a generator or a reward worker sees them."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence

from offbeat.config.service import RedisSettings
from offbeat.errors import ServiceUnavailable
from offbeat.streams.base import Delivery, Stream, WorkerStreams
from offbeat.streams.gathering import Gathering
from offbeat.streams.holdings import EntryKey, Holdings
from offbeat.streams.keys import GROUPS, SOURCES, TARGETS, Keys, Role
from offbeat.streams.link import Argument, Link, NoGroup, Unreachable, fields_of, gap_ms
from offbeat.streams.records import Fields, Malformed, decode
from offbeat.v1 import samples_pb2 as samples

log = logging.getLogger(__name__)

HAND_OFFS = 64
HAND_OFF_BYTES = 4 * 1024**2
"""Of one script, which keeps Redis from everything else while it runs."""

POLL_SECONDS = 0.25
"""How often entries that exist but could not be taken (version, fair share, idle time) are looked at again."""


class RedisWorkerStreams(WorkerStreams):
    """See `WorkerStreams`. `role` says which streams: "generator" or "reward".

    The consumer name is `member_id` and a random part: a restarted worker is a new consumer, and what its predecessor
    held counts as entries of a dead worker. All methods wait for a Redis that is away, for
    `settings.outage_seconds` at most; then they raise `ServiceUnavailable`.
    """

    def __init__(
        self, url: str, run_id: str, role: Role, member_id: str, settings: RedisSettings
    ) -> None:
        self._role: Role = role
        self._group = GROUPS[SOURCES[role][0]]
        self._sources = SOURCES[role]
        self._settings = settings
        self._keys = Keys(run_id)
        self._stream_keys = [self._keys.stream(stream) for stream in self._sources]
        self._link = Link(
            url, outage_seconds=settings.outage_seconds, password_file=settings.password_file
        )
        self.consumer = f"{member_id}.{secrets.token_hex(4)}"
        self._announcement: dict[str, object] = {"member_id": member_id, "address": "", "info": {}}
        self._holdings = Holdings(settings.max_hold_seconds)
        self._taking = asyncio.Lock()
        self._hand_offs = Gathering(
            self._hand_off,
            size_of=lambda item: len(item[1]),
            max_items=HAND_OFFS,
            max_bytes=HAND_OFF_BYTES,
        )
        # Whether Redis may have delivered something in a reply that never came.
        self._unsure = False

    # --- taking ------------------------------------------------------------------------------------------------

    async def take(
        self, limit: int, *, held_version: int = 0, wait_seconds: float = 1.0
    ) -> list[Delivery]:
        """See `WorkerStreams.take`. Also returns [] while Redis is away."""
        end = time.monotonic() + wait_seconds
        while limit > 0:
            after = dict.fromkeys(self._stream_keys, "$")
            left_behind = 1
            try:
                async with self._taking:
                    if not self._holdings.alone:
                        found, after, left_behind = await self._take_once(limit, held_version)
                        self._holdings.add(found)
                        if found:
                            return found
            except Unreachable as error:
                if self._link.given_up:
                    raise self._link.unavailable("new entries", error) from error
            except NoGroup:
                pass  # the learner has not created the streams yet, or Redis was emptied and it will again
            left = end - time.monotonic()
            if left <= 0:
                return []
            # A new entry ends the wait. What is there but could not be taken does not, hence the polling.
            await self._link.wait_for_entries(
                after, min(left, POLL_SECONDS) if left_behind else left
            )
        await asyncio.sleep(wait_seconds)
        return []

    async def _take_once(
        self, limit: int, held_version: int
    ) -> tuple[list[Delivery], dict[str, str], int]:
        if self._unsure:
            recovered = await self._recover(limit)
            if recovered:
                return recovered, {}, 0
        gate = held_version if self._role == "generator" else -1
        args: list[Argument] = [self._group, self.consumer, limit, gate, self._min_idle_ms]
        args += [int(self._would_claim), gap_ms(self._settings)]
        args += [len(self._sources), *self._sources]
        args += [self._lone_field(key) for key in self._holdings.keys]
        keys = [self._keys.members(self._role), self._keys.lone, self._keys.stream(Stream.DEAD)]
        keys += [self._keys.awake]
        # Set before and cleared after, so that a lost reply and a cancelled call are both seen by the next one.
        self._unsure = True
        entries, newest, left_behind = await self._link.once("take", keys + self._stream_keys, args)
        found: list[Delivery] = []
        for index, entry_id, count, alone, flat in entries:
            key = self._sources[index - 1], entry_id.decode()
            found += await self._delivery(key, count, bool(alone), fields_of(flat))
        self._unsure = False
        after = dict(
            zip(self._stream_keys, (entry_id.decode() for entry_id in newest), strict=True)
        )
        return found, after, left_behind

    @property
    def _min_idle_ms(self) -> int:
        return max(1, int(1000 * self._settings.min_idle_seconds))

    @property
    def _would_claim(self) -> bool:
        """False for one idle time after an outage that this worker saw: others may have been cut off, too.

        What it did not see, a frozen Redis or a restart before its own start, is noticed by the script.
        """
        length, ended = self._link.last_outage
        seen = length > self._settings.beat_seconds
        return not seen or time.monotonic() >= ended + self._settings.min_idle_seconds

    async def _delivery(
        self, key: EntryKey, count: int, alone: bool, fields: Fields
    ) -> list[Delivery]:
        """The delivery of an entry; nothing, and a dead letter, when it is no record."""
        try:
            return [Delivery(*key, decode(key[0], fields), count, alone)]
        except Malformed as error:
            await self._fail(key, f"malformed record: {error}", final=True)
            return []

    async def _recover(self, limit: int) -> list[Delivery]:
        """Entries that Redis delivered to this consumer in a reply that it never got."""
        found: list[Delivery] = []
        for stream in self._sources:
            rows = await self._link.pending_of(
                self._keys.stream(stream), self._group, self.consumer
            )
            for entry_id, count in rows:
                key = stream, entry_id
                if self._holdings.handled(key):
                    continue
                if len(found) == limit:
                    return found
                fields = await self._link.entry(self._keys.stream(stream), entry_id)
                alone = await self._link.hash_field(self._keys.lone, self._lone_field(key))
                if fields is not None:
                    found += await self._delivery(key, count, alone is not None, fields)
        self._unsure = False
        if found:
            log.warning("%d entries were delivered in a reply that got lost; taken now", len(found))
        return found

    def _lone_field(self, key: EntryKey) -> str:
        return f"{self._keys.stream(key[0])}|{key[1]}"

    # --- working -----------------------------------------------------------------------------------------------

    async def hand_off(
        self, delivery: Delivery, result: samples.Rollout | samples.ScoredRollout
    ) -> bool:
        """See `WorkerStreams.hand_off`. Also False when only the reply to an earlier try was lost."""
        with self._holdings.leaving([delivery.key]):
            moved = await self._hand_offs.add((delivery.key, result.SerializeToString()))
            self._holdings.forget([delivery.key])
        return moved

    async def _hand_off(self, batch: Sequence[tuple[EntryKey, bytes]]) -> list[bool]:
        args: list[Argument] = [self._group, "p" if self._role == "generator" else "s"]
        for (stream, entry_id), result in batch:
            args += [self._sources.index(stream) + 1, entry_id, result]
        keys = [self._keys.stream(TARGETS[self._role]), self._keys.lone, *self._stream_keys]
        (stream, entry_id), _ = batch[0]
        what = f"handing off {stream} {entry_id} and {len(batch) - 1} more"
        return [bool(moved) for moved in await self._link.run(what, "hand_off", keys, args)]

    async def beat(self, deliveries: Iterable[Delivery]) -> set[EntryKey]:
        """See `WorkerStreams.beat`. Entries held for too long are lost as well, and not beaten.

        While Redis is away nothing is known to be lost, so that the work goes on.
        """
        asked = [delivery.key for delivery in deliveries]
        current = set(self._holdings.keys)
        beaten = [key for key in asked if key in current]
        try:
            rejected = await self._beat(beaten, patience=self._settings.beat_seconds)
        except ServiceUnavailable:
            if self._link.given_up:
                raise
            rejected = []
        stale = set(asked) - current
        return self._holdings.lose(stale, [beaten[position - 1] for position in rejected])

    async def _beat(self, keys: Sequence[EntryKey], patience: float | None = None) -> list[int]:
        forget_ms = 2 * self._min_idle_ms
        args: list[Argument] = [
            self._group,
            self.consumer,
            json.dumps(self._announcement),
            forget_ms,
            gap_ms(self._settings),
            self._min_idle_ms,
        ]
        args += self._pairs(keys)
        registry = [self._keys.members(self._role), self._keys.info(self._role), self._keys.awake]
        positions: list[int] = await self._link.run(
            "a heartbeat", "beat", registry + self._stream_keys, args, patience=patience
        )
        return positions

    def _pairs(self, keys: Iterable[EntryKey]) -> list[Argument]:
        pairs: list[Argument] = []
        for stream, entry_id in keys:
            pairs += [self._sources.index(stream) + 1, entry_id]
        return pairs

    async def hand_back(self, deliveries: Iterable[Delivery]) -> None:
        """See `WorkerStreams.hand_back`."""
        keys = [delivery.key for delivery in deliveries]
        args = [self._group, self.consumer, *self._pairs(keys)]
        with self._holdings.leaving(keys):
            await self._link.run(
                "giving entries back", "hand_back", [self._keys.lone, *self._stream_keys], args
            )
            self._holdings.forget(keys)

    async def fail(self, delivery: Delivery, reason: str, *, final: bool) -> None:
        """See `WorkerStreams.fail`."""
        await self._fail(delivery.key, reason, final=final)

    async def _fail(self, key: EntryKey, reason: str, *, final: bool) -> None:
        stream, entry_id = key
        keys = [self._keys.stream(stream), self._keys.stream(Stream.DEAD), self._keys.lone]
        with self._holdings.leaving([key]):
            dead = await self._link.run(
                f"giving up {stream} {entry_id}",
                "fail",
                keys,
                [self._group, self.consumer, entry_id, stream, reason, int(final)],
            )
            self._holdings.forget([key])
        after = "dead now" if dead else "tried again alone"
        log.warning("%s %s failed (%s): %s", stream, entry_id, after, reason)

    # --- membership --------------------------------------------------------------------------------------------

    async def announce(self, address: str, info: Mapping[str, str]) -> None:
        """See `WorkerStreams.announce`. Each heartbeat repeats it, so an emptied Redis learns it again."""
        self._announcement |= {"address": address, "info": dict(info)}
        await self._beat([])

    async def finished(self) -> bool:
        """See `WorkerStreams.finished`."""
        return bool(
            await self._link.ask("whether the run is finished", "exists", self._keys.finished)
        )

    async def leave(self) -> None:
        """See `WorkerStreams.leave`."""
        registry = [self._keys.members(self._role), self._keys.info(self._role)]
        args = [self._group, self.consumer]
        await self._link.run("leaving", "leave", registry + self._stream_keys, args)

    async def close(self) -> None:
        """See `WorkerStreams.close`."""
        await self._link.close()
