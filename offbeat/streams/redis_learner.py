"""The sample streams on Redis, as the learner sees them; `offbeat status` reads through it too."""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from offbeat.config.service import RedisSettings
from offbeat.errors import ServiceUnavailable, StreamError
from offbeat.streams.base import Backlog, Delivery, InFlight, LearnerStreams, Member, Stream
from offbeat.streams.keys import GROUPS, LEARNER, SOURCES, Keys, Role
from offbeat.streams.link import Argument, Link, NoGroup, Unreachable, fields_of, gap_ms
from offbeat.streams.records import (
    Fields,
    Malformed,
    decode,
    in_flight_field,
    settled_field,
    task_fields,
)
from offbeat.streams.server_check import check_server
from offbeat.v1 import samples_pb2 as samples

log = logging.getLogger(__name__)

CHUNK = 64
"""Tasks of one issue script, entries of one settle script: bounds how long Redis is busy with one."""

COLLECTED = (Stream.SCORED, Stream.DEAD)

EMPTIED = "what is expected and not in flight must be issued again"


class RedisLearnerStreams(LearnerStreams):
    """See `LearnerStreams`. Before `begin_term` only what changes nothing may be called.

    Every call but `collect` waits for a Redis that is away, for `settings.outage_seconds` at most; then it raises
    `ServiceUnavailable`.
    """

    def __init__(self, url: str, run_id: str, learner_id: str, settings: RedisSettings) -> None:
        self._learner_id = learner_id
        self._settings = settings
        self._keys = Keys(run_id)
        self._link = Link(
            url, outage_seconds=settings.outage_seconds, password_file=settings.password_file
        )
        self._term: int | None = None
        self._collected: set[tuple[Stream, str]] = set()
        # At first, too: a process of the same learner and term may have collected something.
        self._unsure = True
        self._outages_told = 0

    # --- start and end -----------------------------------------------------------------------------------------

    async def prepare(self, *, needed_bytes: int) -> None:
        """See `LearnerStreams.prepare`."""
        info = await self._link.ask("its state", "info")
        streams = [self._keys.stream(stream) for stream in Stream]
        used = [await self._link.ask("memory of a stream", "memory_usage", key) for key in streams]
        own_bytes = sum(size or 0 for size in used)
        check_server(self._link.address, info, needed_bytes=needed_bytes, own_bytes=own_bytes)
        await self._create_groups()

    async def _create_groups(self) -> int:
        groups = [GROUPS[stream] for stream in Stream]
        keys = [self._keys.stream(stream) for stream in Stream]
        missing = await self._link.run("creating consumer groups", "create", keys, groups)
        return int(missing)

    async def begin_term(self, term: int) -> None:
        """See `LearnerStreams.begin_term`."""
        evaluations = self._keys.stream(Stream.EVALUATIONS)
        keys = [self._keys.term, self._keys.finished, self._keys.in_flight, evaluations]
        args: list[Argument] = [term, self._learner_id, GROUPS[Stream.EVALUATIONS]]
        await self._link.run("beginning a term", "begin_term", [*keys, self._keys.lone], args)
        self._term = term

    @property
    def _current_term(self) -> int:
        if self._term is None:
            raise StreamError(
                "expected a term, found none: call begin_term before changing anything"
            )
        return self._term

    async def finish(self) -> None:
        """See `LearnerStreams.finish`."""
        keys = [self._keys.term, self._keys.finished]
        await self._link.run("marking the run as finished", "finish", keys, [self._current_term])

    async def close(self) -> None:
        """See `LearnerStreams.close`."""
        await self._link.close()

    # --- issuing -----------------------------------------------------------------------------------------------

    async def issue(self, tasks: Sequence[samples.PromptTask]) -> int:
        """See `LearnerStreams.issue`."""
        await self._heal()
        keys = [self._keys.term, self._keys.in_flight]
        keys += [self._keys.stream(Stream.PROMPTS), self._keys.stream(Stream.EVALUATIONS)]
        issued = 0
        for start in range(0, len(tasks), CHUNK):
            args: list[Argument] = [self._current_term]
            for task in tasks[start : start + CHUNK]:
                fields = _flat(task)
                place = 4 if task.kind == samples.TASK_KIND_EVALUATION else 3
                args += [
                    place,
                    in_flight_field(task),
                    task.term,
                    task.attempt,
                    len(fields),
                    *fields,
                ]
            issued += await self._link.run("issuing prompt tasks", "issue", keys, args)
        return issued

    async def _heal(self) -> bool:
        """Creates consumer groups that are missing; returns whether any was, which means that data was lost."""
        missing = await self._create_groups()
        if missing:
            log.error(
                "Redis at %s lost %d of the run's consumer groups, and with them samples under way; created again: %s",
                self._link.address,
                missing,
                EMPTIED,
            )
        return missing > 0

    async def in_flight(self) -> dict[int, InFlight]:
        """See `LearnerStreams.in_flight`."""
        passed = (Stream.PROMPTS, Stream.ROLLOUTS, Stream.SCORED)
        keys = [self._keys.in_flight, self._keys.stream(Stream.DEAD)]
        keys += [self._keys.stream(stream) for stream in passed]
        flat = await self._link.run("what is in flight", "in_flight", keys, [GROUPS[Stream.DEAD]])
        found = {}
        for ordinal, value in fields_of(flat).items():
            term, attempt = value.split(b":")
            found[int(ordinal)] = InFlight(int(term), int(attempt))
        return found

    # --- collecting --------------------------------------------------------------------------------------------

    async def collect(
        self, *, limit: int = 64, wait_seconds: float = 1.0
    ) -> list[Delivery[samples.ScoredRollout] | Delivery[samples.DeadLetter]]:
        """See `LearnerStreams.collect`. Raises `ServiceUnavailable` at once when Redis does not answer, did not answer
        some other call since the last time, or had lost its groups: the caller must then look for ordinals that have
        to be issued again."""
        end = time.monotonic() + wait_seconds
        while True:
            self._tell_of_outage()
            try:
                found, after = await self._collect_once(limit)
                self._collected |= {delivery.key for delivery in found}
            except Unreachable as error:
                self._outages_told = self._link.outages
                raise self._link.unavailable("scored groups", error) from error
            except NoGroup as error:
                await self._heal()
                raise ServiceUnavailable(
                    f"Redis at {self._link.address} was emptied; {EMPTIED}"
                ) from error
            left = end - time.monotonic()
            if found or left <= 0:
                return found
            await self._link.wait_for_entries(after, left)

    def _tell_of_outage(self) -> None:
        """A server that was away may have come back with less than it had, whichever call saw it."""
        if self._link.outages > self._outages_told:
            self._outages_told = self._link.outages
            raise ServiceUnavailable(f"Redis at {self._link.address} was away; {EMPTIED}")

    async def _collect_once(self, limit: int) -> tuple[list[Delivery[Any]], dict[str, str]]:
        keys = [self._keys.stream(stream) for stream in COLLECTED]
        term = self._current_term
        if self._unsure:
            recovered = await self._recover(limit)
            if recovered:
                return recovered, {}
        self._unsure = True
        args: list[Argument] = [term, LEARNER, self._consumer, limit, gap_ms(self._settings)]
        first = [self._keys.term, self._keys.awake]
        entries, newest = await self._link.once("collect", [*first, *keys], args)
        found = []
        for index, entry_id, flat in entries:
            stream = COLLECTED[index - 1]
            found += await self._delivery(stream, entry_id.decode(), fields_of(flat))
        self._unsure = False
        return found, dict(zip(keys, (entry_id.decode() for entry_id in newest), strict=True))

    @property
    def _consumer(self) -> str:
        return f"term-{self._current_term}"

    async def _delivery(self, stream: Stream, entry_id: str, fields: Fields) -> list[Delivery[Any]]:
        """The entry, or nothing when it is no record: then it comes again, as a dead letter."""
        try:
            return [Delivery(stream, entry_id, decode(stream, fields))]
        except Malformed as error:
            await self._bury(stream, entry_id, f"malformed record: {error}")
            return []

    async def _bury(self, stream: Stream, entry_id: str, reason: str) -> None:
        log.warning("%s %s is dead: %s", stream, entry_id, reason)
        keys = [self._keys.term, self._keys.stream(stream)]
        keys += [self._keys.stream(Stream.DEAD), self._keys.lone]
        args: list[Argument] = [
            self._current_term,
            LEARNER,
            entry_id,
            stream,
            reason,
            self._learner_id,
        ]
        await self._link.run("burying an entry", "bury", keys, args)

    async def _recover(self, limit: int) -> list[Delivery[Any]]:
        """Entries that Redis delivered to this term in a reply that never came."""
        found: list[Delivery[Any]] = []
        for stream in COLLECTED:
            key = self._keys.stream(stream)
            for entry_id, _ in await self._link.pending_of(key, LEARNER, self._consumer):
                if (stream, entry_id) in self._collected:
                    continue
                if len(found) == limit:
                    return found
                fields = await self._link.entry(key, entry_id)
                if fields is not None:
                    found += await self._delivery(stream, entry_id, fields)
        self._unsure = False
        return found

    # --- settling ----------------------------------------------------------------------------------------------

    async def settle(self, deliveries: Iterable[Delivery], ordinals: Iterable[int]) -> None:
        """See `LearnerStreams.settle`. What belongs to evaluations is taken out of flight as well."""
        settled = list(deliveries)
        fields = [str(ordinal) for ordinal in ordinals]
        told = [settled_field(delivery.record) for delivery in settled]
        fields += [field for field in told if field is not None]
        for start in range(0, len(settled), CHUNK):
            await self._settle(settled[start : start + CHUNK], [])
        for start in range(0, len(fields), CHUNK):
            await self._settle([], fields[start : start + CHUNK])
        self._collected -= {delivery.key for delivery in settled}

    async def _settle(self, deliveries: Sequence[Delivery], fields: Sequence[str]) -> None:
        keys = [self._keys.term, self._keys.in_flight, *map(self._keys.stream, COLLECTED)]
        args: list[Argument] = [self._current_term, LEARNER, len(deliveries)]
        for delivery in deliveries:
            args += [3 + COLLECTED.index(delivery.stream), delivery.entry_id]
        await self._link.run("settling entries", "settle", keys, [*args, *fields])

    async def retire(self, delivery: Delivery, task: samples.PromptTask) -> None:
        """See `LearnerStreams.retire`."""
        evaluation = task.kind == samples.TASK_KIND_EVALUATION
        target = Stream.EVALUATIONS if evaluation else Stream.PROMPTS
        keys = [self._keys.term, self._keys.in_flight]
        keys += [self._keys.stream(delivery.stream), self._keys.stream(target)]
        args: list[Argument] = [self._current_term, LEARNER, delivery.entry_id]
        args += [in_flight_field(task), task.term, task.attempt, *_flat(task)]
        await self._link.run(f"retiring ordinal {task.ordinal}", "retire", keys, args)
        self._collected.discard(delivery.key)

    # --- looking -----------------------------------------------------------------------------------------------

    async def backlog(self) -> list[Backlog]:
        """See `LearnerStreams.backlog`."""
        found = []
        for stream in Stream:
            key = self._keys.stream(stream)
            entries = await self._link.ask("length of a stream", "xlen", key)
            found.append(Backlog(stream, entries, sum((await self._pending(stream)).values())))
        return found

    async def _pending(self, stream: Stream) -> dict[str, int]:
        """Consumer -> number of entries that it holds."""
        try:
            summary = await self._link.ask(
                "pending entries", "xpending", self._keys.stream(stream), GROUPS[stream]
            )
        except NoGroup:
            return {}
        return {row["name"].decode(): int(row["pending"]) for row in summary["consumers"]}

    async def members(self) -> list[Member]:
        """See `LearnerStreams.members`."""
        return [member for role in get_args(Role) for member in await self._members(role)]

    async def _members(self, role: Role) -> list[Member]:
        seconds, microseconds = await self._link.ask("its clock", "time")
        now = seconds + microseconds / 1e6
        beats = await self._link.ask(
            "members", "zrange", self._keys.members(role), 0, -1, withscores=True
        )
        announced = await self._link.ask("members", "hgetall", self._keys.info(role))
        held = [await self._pending(stream) for stream in SOURCES[role]]
        found = []
        for consumer, beat in beats:
            silent = max(0.0, now - beat / 1000)
            if silent < self._settings.min_idle_seconds:
                said = json.loads(announced.get(consumer, b"{}"))
                name = consumer.decode()
                found.append(
                    Member(
                        member_id=said.get("member_id", name),
                        role=role,
                        address=said.get("address", ""),
                        seconds_since_beat=silent,
                        pending=sum(pending.get(name, 0) for pending in held),
                        info=said.get("info", {}),
                    )
                )
        return found


def _flat(task: samples.PromptTask) -> list[bytes]:
    return [part for pair in task_fields(task).items() for part in pair]
