"""The port of the sample streams: what workers and the learner may ask of a queue.

    prompts, evaluations --> generator --> rollouts --> reward --> scored --> learner
                                   \\______________\\______> dead ______/

Every arrow is one atomic hand-off, so an entry goes on exactly once however often it was delivered.
`offbeat.streams.redis` is the real adapter, `offbeat.streams.memory` the one for unit tests.

Life of an entry at a worker: *taken* (delivered to this consumer, pending) -> *beaten* while the worker makes
progress -> *handed off* (gone from this stream, present in the next), *handed back* (pending for nobody, claimable
at once), *failed* (runs alone next time; when it already ran alone: dead), or, when the worker dies, *claimed* by a
peer after a minimum idle time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from offbeat.v1 import samples_pb2 as samples


class Stream(StrEnum):
    """Names of the streams; also the last part of their keys."""

    PROMPTS = "prompts"
    EVALUATIONS = "evaluations"
    ROLLOUTS = "rollouts"
    SCORED = "scored"
    DEAD = "dead"


Record = TypeVar(
    "Record", samples.PromptTask, samples.Rollout, samples.ScoredRollout, samples.DeadLetter
)


@dataclass(frozen=True)
class Delivery(Generic[Record]):
    """An entry that this consumer holds until it hands it off, hands it back, fails it, or dies."""

    stream: Stream
    entry_id: str
    record: Record
    deliveries: int = 1
    """How often the entry was delivered to a consumer that could have died of it (1 = the first time)."""
    alone: bool = False
    """True when the worker must process this entry with nothing else under way: it was there at two deaths."""

    @property
    def key(self) -> tuple[Stream, str]:
        """Identifies the entry within the run."""
        return self.stream, self.entry_id


@dataclass(frozen=True)
class InFlight:
    """Which attempt of an ordinal is under way."""

    term: int
    attempt: int


@dataclass(frozen=True)
class Member:
    """A worker that showed a sign of life recently."""

    member_id: str
    role: str
    address: str
    seconds_since_beat: float
    pending: int = 0
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Backlog:
    """How full one stream is."""

    stream: Stream
    entries: int
    pending: int


class WorkerStreams(ABC):
    """What a generator or a reward worker needs. One object per process; safe for concurrent coroutines."""

    @abstractmethod
    async def take(
        self, limit: int, *, held_version: int = 0, wait_seconds: float = 1.0
    ) -> list[Delivery]:
        """Returns up to `limit` entries, evaluations first, or [] after `wait_seconds`.

        Never takes more than this worker's fair share of what is in the stream: ceil(entries / live workers) held at
        once. Entries whose `min_version` is above `held_version` stay in the stream (generators only). Entries of dead
        workers are claimed once they were idle for the minimum idle time. An `alone` entry is returned alone. A record
        that can't be parsed is dead-lettered and not returned.
        """

    @abstractmethod
    async def hand_off(
        self, delivery: Delivery, result: samples.Rollout | samples.ScoredRollout
    ) -> bool:
        """Moves the entry on with its result. False when somebody else already did: drop the result, it is no error.

        A generator gives a `Rollout`; a reward worker gives a `ScoredRollout` without its `rollout`, which is carried
        over inside Redis.
        """

    @abstractmethod
    async def beat(self, deliveries: Iterable[Delivery]) -> set[tuple[Stream, str]]:
        """Tells that these entries are being worked on, and that this worker lives. Call only after real progress.

        Returns the keys that this worker does not own any more (claimed by a peer): stop working on them.
        """

    @abstractmethod
    async def hand_back(self, deliveries: Iterable[Delivery]) -> None:
        """Gives entries back unprocessed (drain): claimable at once, the delivery is not counted against them."""

    @abstractmethod
    async def fail(self, delivery: Delivery, reason: str, *, final: bool) -> None:
        """The entry could not be processed. `final`: the cause is surely the entry itself, so it is dead at once;

        otherwise it is tried again alone, and dead when it was alone already.
        """

    @abstractmethod
    async def announce(self, address: str, info: Mapping[str, str]) -> None:
        """Registers this worker (address to reach its gRPC port, version held, …) for status and fair shares."""

    @abstractmethod
    async def finished(self) -> bool:
        """Whether the learner has marked the run as finished: a worker may end when it holds nothing."""

    @abstractmethod
    async def leave(self) -> None:
        """Removes this worker; its consumer name goes only when it holds nothing."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the connections."""


class LearnerStreams(ABC):
    """What the learner needs. Every changing call is refused with `Fenced` once a newer term began."""

    @abstractmethod
    async def prepare(self, *, needed_bytes: int) -> None:
        """Checks the server (version, eviction policy, memory >= needed_bytes) and creates streams and groups.

        Raises `StreamError` that says what was expected, found, and what to do.
        """

    @abstractmethod
    async def begin_term(self, term: int) -> None:
        """Makes `term` the current one. Raises `Fenced` when a newer one was begun.

        Tasks of earlier terms' evaluations that nobody has generated yet are removed: nobody waits for them.
        """

    @abstractmethod
    async def issue(self, tasks: Sequence[samples.PromptTask]) -> int:
        """Puts the tasks whose ordinal is not under way on their stream; returns how many that were.

        Idempotent: an ordinal that `in_flight` holds with the same or a newer (term, attempt) is not issued again.
        Raises `BacklogFull` when Redis has no memory; then none or some were issued, and calling again is safe.
        """

    @abstractmethod
    async def in_flight(self) -> dict[int, InFlight]:
        """Training ordinals under way: issued, not yet settled, and with an entry on one of the streams."""

    @abstractmethod
    async def collect(
        self, *, limit: int = 64, wait_seconds: float = 1.0
    ) -> list[Delivery[samples.ScoredRollout] | Delivery[samples.DeadLetter]]:
        """Returns new scored groups and dead letters. First of all come those that an earlier term had collected
        and not settled. They stay pending until `settle`.

        Raises `ServiceUnavailable` at once when the server does not answer, was away since the last call, or was
        emptied: entries may be lost, so the caller must compare `in_flight` with what it expects, and issue what is
        absent.
        """

    @abstractmethod
    async def settle(self, deliveries: Iterable[Delivery], ordinals: Iterable[int]) -> None:
        """Removes entries for good and takes `ordinals` out of `in_flight`. Dead letters stay readable.

        Call it only once a durable checkpoint contains what was learned from them (or they are duplicates, retired,
        or belong to an evaluation).
        """

    @abstractmethod
    async def retire(self, delivery: Delivery, task: samples.PromptTask) -> None:
        """Replaces a collected group that must not be trained on by the next attempt of its ordinal, atomically."""

    @abstractmethod
    async def backlog(self) -> list[Backlog]:
        """How full the streams are."""

    @abstractmethod
    async def members(self) -> list[Member]:
        """Workers alive."""

    @abstractmethod
    async def finish(self) -> None:
        """Marks the run as finished, so that workers may end (`finished`)."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the connections."""
