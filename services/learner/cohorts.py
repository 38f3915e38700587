"""Admission and gathering of cohorts: the state machine that bounds staleness. No I/O; used by `coordinator`.

Cohort c is the ordinals c*P .. (c+1)*P - 1, and step c trains exactly cohort c. Cohort c may be issued once the
weights after max(0, c - S) steps are committed (S = max_lag). A generator starts a task only with those weights or
newer ones, so a sample that step c consumes is at most S steps old. Nothing else bounds staleness, and nothing is
generated to be thrown away.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from offbeat.errors import OffbeatError
from offbeat.streams.base import Delivery
from offbeat.v1 import samples_pb2 as samples


class Verdict(StrEnum):
    """What happened to a group that arrived."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """The ordinal has a result already, or its step is over."""
    ABANDONED = "abandoned"
    """A token of it comes from a version that is no ancestor of the present weights; it must be generated again."""
    TOO_OLD = "too old"
    """Issued under a larger max_lag, before the run was resumed; it must be generated again."""


class LagExceeded(OffbeatError):
    """A sample is older than max_lag, or newer than the learner. The invariant of the whole system is broken."""


@dataclass
class Lineage:
    """Versions that the present weights descend from: number -> (steps, updates) in it."""

    versions: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, version: int, step: int, update: int) -> None:
        """A version was committed. Raises `OffbeatError` when the number does not grow."""
        newest = max(self.versions, default=0)
        if version <= newest:
            raise OffbeatError(
                f"version {version} was committed after {newest}: numbers must grow; "
                "is the checkpoint service another run's?"
            )
        self.versions[version] = (step, update)

    def contains(self, group: samples.Rollout) -> bool:
        """Whether every token of the group comes from an ancestor of the present weights."""
        return all(
            span.version in self.versions
            for completion in group.completions
            for span in completion.version_spans
        )

    def at_step(self, step: int) -> int:
        """The version with the fewest steps from `step` on; of several, the newest.

        After a resume there are two with the same steps; generators may hold abandoned versions between them.
        """
        enough = [
            (steps, -version) for version, (steps, _) in self.versions.items() if steps >= step
        ]
        return -min(enough)[1]

    def oldest(self, completions: Iterable[samples.Completion]) -> int:
        """Version of the oldest token of the completions; the newest version when they have no tokens."""
        spans = [span.version for completion in completions for span in completion.version_spans]
        return min(spans, default=max(self.versions))


@dataclass
class Place:
    """One ordinal of a cohort that is under way."""

    attempt: int = 0
    inherited: bool = False
    """Issued by an earlier term, perhaps under another max_lag."""
    delivery: Delivery | None = None
    group: samples.ScoredRollout | None = None
    dead: str | None = None

    @property
    def settled(self) -> bool:
        """Whether the ordinal has its outcome."""
        return self.group is not None or self.dead is not None


class Cohorts:
    """Cohorts that are issued and not yet trained.

    `first_step` is the first step to train: 0, or where a checkpoint left off.
    """

    def __init__(
        self, *, prompts_per_step: int, max_lag: int, total_steps: int, first_step: int = 0
    ) -> None:
        self._size = prompts_per_step
        self._max_lag = max_lag
        self._total = total_steps
        self._first = first_step
        self._next_issue = first_step
        self._next_train = first_step
        self._places: dict[int, Place] = {}
        self.lineage = Lineage()

    @property
    def next_step(self) -> int:
        """The step that is trained next."""
        return self._next_train

    @property
    def outstanding(self) -> int:
        """Ordinals that are issued and have no outcome yet."""
        # A copy: the loop's thread asks while the event loop's thread admits.
        return sum(not place.settled for place in list(self._places.values()))

    def ordinals(self, cohort: int) -> range:
        """The ordinals of a cohort."""
        return range(cohort * self._size, (cohort + 1) * self._size)

    def min_version(self, cohort: int) -> int:
        """The version that cohort `cohort` must at least be generated with."""
        return self.lineage.at_step(max(self._first, cohort - self._max_lag))

    def admit(self) -> list[int]:
        """Cohorts that may be issued now and were not; they count as issued from here on."""
        if not self.lineage.versions:
            return []
        committed = max(step for step, _ in self.lineage.versions.values())
        admitted = []
        while (
            self._next_issue < self._total and max(0, self._next_issue - self._max_lag) <= committed
        ):
            admitted.append(self._next_issue)
            self._places.update((ordinal, Place()) for ordinal in self.ordinals(self._next_issue))
            self._next_issue += 1
        return admitted

    @property
    def places(self) -> list[Place]:
        """Of all ordinals that are issued and not yet trained."""
        return list(self._places.values())

    def missing(self) -> list[int]:
        """Ordinals that are issued and have no outcome yet."""
        return [ordinal for ordinal, place in self._places.items() if not place.settled]

    def attempt(self, ordinal: int) -> int:
        """The newest attempt of an ordinal that is under way."""
        return self._places[ordinal].attempt

    def inherit(self, ordinal: int, attempt: int) -> None:
        """An attempt that an earlier term issued is still under way."""
        self._places[ordinal].attempt = attempt
        self._places[ordinal].inherited = True

    def next_attempt(self, ordinal: int, seen: int = 0) -> int:
        """Starts a new attempt, larger than every one before and than `seen`; returns it."""
        place = self._places[ordinal]
        place.attempt = max(place.attempt, seen) + 1
        return place.attempt

    def add_group(self, delivery: Delivery[samples.ScoredRollout]) -> Verdict:
        """A scored group arrived. The first one of an ordinal wins."""
        place = self._places.get(delivery.record.rollout.task.ordinal)
        if place is None or place.settled:
            return Verdict.DUPLICATE
        completions = delivery.record.rollout.completions
        if not self.lineage.contains(delivery.record.rollout):
            return Verdict.ABANDONED
        step = delivery.record.rollout.task.ordinal // self._size
        if place.inherited and self.lag(step, completions) > self._max_lag:
            return Verdict.TOO_OLD
        place.delivery, place.group = delivery, delivery.record
        return Verdict.ACCEPTED

    def add_dead(
        self,
        ordinal: int,
        reason: str,
        delivery: Delivery | None = None,
        *,
        attempt: int | None = None,
    ) -> Verdict:
        """An ordinal was given up: it is an empty place of its cohort. An older attempt's death says nothing."""
        place = self._places.get(ordinal)
        if place is None or place.settled or (attempt is not None and attempt < place.attempt):
            return Verdict.DUPLICATE
        place.delivery, place.dead = delivery, reason
        return Verdict.ACCEPTED

    def complete(self) -> bool:
        """Whether the next step's cohort has all its outcomes."""
        # Asked at each arrival: it ends at the first place that is empty.
        places = map(self._places.get, self.ordinals(self._next_train))
        return all(place is not None and place.settled for place in places)

    def pop(self) -> list[tuple[int, Place]]:
        """Takes the complete cohort of the next step, in ordinal order. Raises `LagExceeded` if the bound is broken."""
        step = self._next_train
        popped = [(ordinal, self._places.pop(ordinal)) for ordinal in self.ordinals(step)]
        for ordinal, place in popped:
            if place.group is not None:
                lag = self.lag(step, place.group.rollout.completions)
                if not 0 <= lag <= self._max_lag:
                    raise LagExceeded(
                        f"ordinal {ordinal} of step {step} has lag {lag}, expected 0 .. {self._max_lag} (max_lag)"
                    )
        self._next_train += 1
        return popped

    def lag(self, step: int, completions: Iterable[samples.Completion]) -> int:
        """Steps between the weights that `step` starts from and those of the completions' oldest token."""
        return step - self.lineage.versions[self.lineage.oldest(completions)][0]

    def lag_updates(self, update: int, completions: Iterable[samples.Completion]) -> int:
        """The same in optimizer updates, `update` being the updates done before the step."""
        return update - self.lineage.versions[self.lineage.oldest(completions)][1]
