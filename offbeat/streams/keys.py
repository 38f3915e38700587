"""Names of everything that a run keeps in Redis. Used by the Redis adapter and by the version mark.

The run id stands in braces: Redis Cluster hashes only what is inside them, so a run lies in one slot and a script may
touch all of its keys.
"""

from typing import Final, Literal

from offbeat.streams.base import Stream

Role = Literal["generator", "reward"]

SOURCES: Final[dict[Role, tuple[Stream, ...]]] = {
    "generator": (Stream.EVALUATIONS, Stream.PROMPTS),
    "reward": (Stream.ROLLOUTS,),
}
"""Streams that a role takes from, in order of priority."""

TARGETS: Final[dict[Role, Stream]] = {"generator": Stream.ROLLOUTS, "reward": Stream.SCORED}
"""Stream that a role hands off to."""

LEARNER: Final = "learner"

GROUPS: Final[dict[Stream, str]] = {
    Stream.EVALUATIONS: "generator",
    Stream.PROMPTS: "generator",
    Stream.ROLLOUTS: "reward",
    Stream.SCORED: LEARNER,
    Stream.DEAD: LEARNER,
}
"""The consumer group of each stream."""


class Keys:
    """Keys of one run."""

    def __init__(self, run_id: str) -> None:
        self._prefix = f"offbeat:{{{run_id}}}:"
        self.term = self._prefix + "term"
        """Hash: the current term and its learner."""
        self.in_flight = self._prefix + "inflight"
        """Hash: ordinal -> "term:attempt"; see `records.in_flight_field`."""
        self.lone = self._prefix + "lone"
        """Hash: "stream key|entry id" -> "next" (must run alone) or "now:CONSUMER" (runs alone there)."""
        self.awake = self._prefix + "awake"
        """Hash: when anybody last worked on the run, and since when somebody does again; see `may_claim` in
        scripts/common.lua."""
        self.finished = self._prefix + "finished"
        """Exists once the run is finished."""
        self.version = self._prefix + "version"
        """High-water mark of the versions of the weights."""

    def stream(self, stream: Stream) -> str:
        """Key of a stream."""
        return self._prefix + stream.value

    def members(self, role: Role) -> str:
        """Sorted set: consumer -> time of its last sign of life, milliseconds by Redis's clock."""
        return f"{self._prefix}members:{role}"

    def info(self, role: Role) -> str:
        """Hash: consumer -> what it announced, as JSON."""
        return f"{self._prefix}info:{role}"
