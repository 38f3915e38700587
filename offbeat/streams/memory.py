"""The sample streams in the memory of one process. For unit tests only: it has the semantics of the Redis adapter
(the same tests run on both), but neither outages nor lost replies.
"""

import asyncio
import json
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offbeat.config.service import RedisSettings
from offbeat.errors import BacklogFull, Fenced, StreamError
from offbeat.streams.base import (
    Backlog,
    Delivery,
    InFlight,
    LearnerStreams,
    Member,
    Stream,
    WorkerStreams,
)
from offbeat.streams.keys import SOURCES, TARGETS, Role
from offbeat.streams.memory_server import Entry, EntryKey, MemoryServer
from offbeat.streams.records import Malformed, decode, settled_field
from offbeat.v1 import samples_pb2 as samples

__all__ = ["MemoryLearnerStreams", "MemoryServer", "MemoryWorkerStreams"]

POLL_SECONDS = 0.005
HANDED_BACK = "handed-back"
COLLECTED = (Stream.SCORED, Stream.DEAD)


class MemoryWorkerStreams(WorkerStreams):
    """See `WorkerStreams`."""

    def __init__(
        self, server: MemoryServer, role: Role, member_id: str, settings: RedisSettings
    ) -> None:
        self._server = server
        self._role: Role = role
        self._settings = settings
        self._member_id = member_id
        self._announcement: tuple[str, dict[str, str]] = ("", {})
        self._held: dict[EntryKey, float] = {}
        self._alone: EntryKey | None = None  # runs alone while it is held
        self.consumer = f"{member_id}.{secrets.token_hex(4)}"

    async def take(
        self, limit: int, *, held_version: int = 0, wait_seconds: float = 1.0
    ) -> list[Delivery]:
        end = time.monotonic() + wait_seconds
        while True:
            found = self._records(self._take(limit, held_version))
            if found or time.monotonic() >= end:
                return found
            await asyncio.sleep(POLL_SECONDS)

    def _all(self) -> list[tuple[EntryKey, Entry]]:
        streams = self._server.streams
        return [((s, i), entry) for s in SOURCES[self._role] for i, entry in streams[s].items()]

    def _room(self, limit: int) -> int:
        now, idle = self._server.clock(), self._settings.min_idle_seconds
        self._server.beats[self._role, self.consumer] = now
        alive = [
            1
            for (role, _), at in self._server.beats.items()
            if role == self._role and now - at < idle
        ]
        mine = [entry for key, entry in self._all() if key in self._held and self._owned(key)]
        return min(limit, max(1, math.ceil(len(self._all()) / len(alive))) - len(mine))

    def _take(self, limit: int, held_version: int) -> list[EntryKey]:
        room = self._room(limit)
        if room <= 0 or self._alone in self._held:
            return []
        normal: list[EntryKey] = []
        for key, entry in self._all():
            if not self._claimable(key, entry):
                continue
            if entry.lone not in {"", "next"} and entry.owner != HANDED_BACK:
                reason = "its worker died or hung while it processed nothing else "
                owner = entry.owner or ""
                self._server.bury(key, f"{reason}(delivery {entry.deliveries})", owner)
            elif entry.lone == "next" or entry.deliveries + 1 >= 3:
                if not self._held:
                    entry.lone, self._alone = self.consumer, key
                    self._server.deliver(entry, self.consumer)
                    return [key]
            else:
                normal.append(key)
        return self._take_normal(normal, room, held_version)

    def _take_normal(self, claimed: list[EntryKey], room: int, held_version: int) -> list[EntryKey]:
        found: list[EntryKey] = []
        for stream in SOURCES[self._role]:
            new = [
                (stream, entry_id)
                for entry_id, entry in self._server.streams[stream].items()
                if entry.owner is None
            ]
            admitted = [key for key in claimed if key[0] is stream]
            for key in new:
                version = int(self._server.streams[stream][key[1]].fields.get(b"v", b"0"))
                if self._role == "generator" and version > held_version:
                    break
                admitted.append(key)
            for key in admitted[: max(0, room - len(found))]:
                self._server.deliver(self._server.streams[stream][key[1]], self.consumer)
                found.append(key)
        return found

    def _claimable(self, key: EntryKey, entry: Entry) -> bool:
        if entry.owner is None or key in self._held:
            return False
        silent = self._server.clock() - entry.since >= self._settings.min_idle_seconds
        return silent or entry.owner == HANDED_BACK

    def _records(self, keys: Iterable[EntryKey]) -> list[Delivery]:
        found = []
        for key in keys:
            entry = self._server.streams[key[0]][key[1]]
            try:
                record: Any = decode(key[0], entry.fields)
            except Malformed as error:
                self._server.bury(key, f"malformed record: {error}", self.consumer)
                continue
            self._held[key] = self._server.clock()
            found.append(Delivery(*key, record, entry.deliveries, bool(entry.lone)))
        return found

    async def hand_off(
        self, delivery: Delivery, result: samples.Rollout | samples.ScoredRollout
    ) -> bool:
        self._held.pop(delivery.key, None)
        entry = self._server.remove(delivery.key)
        if entry is None:
            return False
        name = b"p" if self._role == "generator" else b"s"
        fields = entry.fields | {name: result.SerializeToString()}
        self._server.add(TARGETS[self._role], fields)
        return True

    def _owned(self, key: EntryKey) -> Entry | None:
        entry = self._server.entry(key)
        return entry if entry is not None and entry.owner == self.consumer else None

    async def beat(self, deliveries: Iterable[Delivery]) -> set[EntryKey]:
        now = self._server.clock()
        oldest = now - self._settings.max_hold_seconds
        self._server.beats[self._role, self.consumer] = now
        lost = set()
        for key in [delivery.key for delivery in deliveries]:
            entry = self._owned(key)
            if entry is None or self._held.get(key, oldest) <= oldest:
                self._held.pop(key, None)
                lost.add(key)
            else:
                entry.since = now
        return lost

    async def hand_back(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._held.pop(delivery.key, None)
            entry = self._owned(delivery.key)
            if entry is not None:
                entry.owner, entry.deliveries = HANDED_BACK, max(0, entry.deliveries - 1)
                entry.lone = entry.lone and "next"

    async def fail(self, delivery: Delivery, reason: str, *, final: bool) -> None:
        self._held.pop(delivery.key, None)
        entry = self._owned(delivery.key)
        if entry is None:
            return
        if final or entry.lone == self.consumer:
            self._server.bury(delivery.key, reason, self.consumer)
        else:
            entry.owner, entry.lone = HANDED_BACK, "next"

    async def announce(self, address: str, info: Mapping[str, str]) -> None:
        self._server.beats[self._role, self.consumer] = self._server.clock()
        said = {"member_id": self._member_id, "address": address, "info": dict(info)}
        self._server.info[self.consumer] = json.dumps(said)

    async def finished(self) -> bool:
        return self._server.finished

    async def leave(self) -> None:
        self._server.beats.pop((self._role, self.consumer), None)

    async def close(self) -> None:
        pass


class MemoryLearnerStreams(LearnerStreams):
    """See `LearnerStreams`."""

    def __init__(self, server: MemoryServer, learner_id: str, settings: RedisSettings) -> None:
        self._server = server
        self._learner_id = learner_id
        self._settings = settings
        self._term: int | None = None
        self._collected: set[EntryKey] = set()

    async def prepare(self, *, needed_bytes: int) -> None:
        pass

    async def begin_term(self, term: int) -> None:
        server = self._server
        same = term == server.term and server.learner in {"", self._learner_id}
        if term < server.term or (term == server.term and not same):
            raise Fenced(
                f"term {server.term} (learner {server.learner}) began already; stop this learner"
            )
        if term > server.term:
            server.forget_evaluations()
        self._term = server.term = term
        server.learner, server.finished = self._learner_id, False

    def _check_term(self) -> None:
        if self._term is None:
            raise StreamError(
                "expected a term, found none: call begin_term before changing anything"
            )
        if self._server.term > self._term:
            raise Fenced(f"term {self._server.term} began after this one; stop this learner")
        self._server.term = self._term

    async def issue(self, tasks: Sequence[samples.PromptTask]) -> int:
        self._check_term()
        if self._server.full:
            raise BacklogFull("the memory of the streams is full; consume something first")
        return sum(self._server.issue(task) for task in tasks)

    async def in_flight(self) -> dict[int, InFlight]:
        return {
            int(name): InFlight(*attempt)
            for name, attempt in self._server.in_flight.items()
            if self._server.is_there(name, attempt[1])
        }

    async def collect(
        self, *, limit: int = 64, wait_seconds: float = 1.0
    ) -> list[Delivery[samples.ScoredRollout] | Delivery[samples.DeadLetter]]:
        end = time.monotonic() + wait_seconds
        while True:
            self._check_term()
            found = self._collect(limit)
            if found or time.monotonic() >= end:
                return found
            await asyncio.sleep(POLL_SECONDS)

    def _collect(self, limit: int) -> list[Delivery]:
        waiting = [
            ((stream, entry_id), entry)
            for stream in COLLECTED
            for entry_id, entry in self._server.streams[stream].items()
            if not entry.settled and (stream, entry_id) not in self._collected
        ]
        waiting.sort(key=lambda item: item[1].owner is None)  # an earlier term's first
        found = []
        for key, entry in waiting[:limit]:
            self._server.deliver(entry, f"term-{self._term}")
            try:
                record: Any = decode(key[0], entry.fields)
                self._collected.add(key)
                found.append(Delivery(*key, record))
            except Malformed as error:
                self._server.bury(key, f"malformed record: {error}", self._learner_id)
        return found

    async def settle(self, deliveries: Iterable[Delivery], ordinals: Iterable[int]) -> None:
        self._check_term()
        for delivery in deliveries:
            self._settle(delivery.key)
            self._server.in_flight.pop(settled_field(delivery.record) or "", None)
        for ordinal in ordinals:
            self._server.in_flight.pop(str(ordinal), None)

    def _settle(self, key: EntryKey) -> None:
        self._collected.discard(key)
        entry = self._server.entry(key)
        if entry is not None and key[0] is Stream.DEAD:
            entry.owner, entry.settled = None, True
        elif entry is not None:
            self._server.remove(key)

    async def retire(self, delivery: Delivery, task: samples.PromptTask) -> None:
        self._check_term()
        self._settle(delivery.key)
        self._server.issue(task)

    async def backlog(self) -> list[Backlog]:
        return [
            Backlog(
                stream, len(entries), sum(entry.owner is not None for entry in entries.values())
            )
            for stream, entries in self._server.streams.items()
        ]

    async def members(self) -> list[Member]:
        found = []
        for (role, consumer), at in self._server.beats.items():
            silent = self._server.clock() - at
            if silent >= self._settings.min_idle_seconds:
                continue
            said = json.loads(self._server.info.get(consumer, "{}"))
            entries = [entry for held in self._server.streams.values() for entry in held.values()]
            found.append(
                Member(
                    member_id=said.get("member_id", consumer),
                    role=role,
                    address=said.get("address", ""),
                    seconds_since_beat=silent,
                    pending=sum(entry.owner == consumer for entry in entries),
                    info=said.get("info", {}),
                )
            )
        return found

    async def finish(self) -> None:
        self._check_term()
        self._server.finished = True

    async def close(self) -> None:
        pass
