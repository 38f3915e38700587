"""Which version may generate what, and when the generator may swap its weights. Pure: the caller tells the time.

A task names the oldest version that may generate it and, in exact lag mode and for evaluations, the newest one too. The
streams see to the oldest; the newest is seen to here: a generator that holds a group does not swap past the group's
newest version, and goes back to an older version for a group that came late.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.v1 import samples_pb2 as samples


@dataclass(frozen=True)
class Range:
    """The versions that may generate a group. `newest` 0: any."""

    oldest: int
    newest: int
    evaluation: bool = False

    @classmethod
    def of(cls, task: samples.PromptTask) -> "Range":
        """The range of a task."""
        return cls(task.min_version, task.max_version, task.kind == samples.TASK_KIND_EVALUATION)

    def __contains__(self, version: int) -> bool:
        return self.oldest <= version and (self.newest == 0 or version <= self.newest)

    def is_late(self, held: int) -> bool:
        """Whether the version held is too new for it."""
        return 0 < self.newest < held


def version_for_late(late: Iterable[Range]) -> int:
    """The version to load for groups that came late, 0 when there is none: the newest that the most patient allows."""
    return max((group.newest for group in late), default=0)


def may_swap(version: int, running: Iterable[Range], *, evaluations_may_hold: bool) -> bool:
    """Whether `version` may be loaded while these groups run.

    A group whose range does not contain it holds the swap: a training group until it is done (its deadline bounds
    that), an evaluation only as long as `evaluations_may_hold`.
    """
    return all(
        version in group or (group.evaluation and not evaluations_may_hold) for group in running
    )


class Watchdog:
    """Tells whether the engine works. Without progress there is no heartbeat, since that would hide a wedged engine."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall = stall_seconds
        self._progress = -1
        self._since: float | None = None

    def look(self, now: float, *, progress: int, busy: bool) -> bool:
        """Notes the engine's progress; returns whether there was any since the last look, or nothing to do."""
        moved = progress != self._progress or not busy
        if moved or self._since is None:
            self._progress = progress
            self._since = now
        return moved

    def stalled(self, now: float, *, times: float = 1.0) -> bool:
        """Whether nothing moved for `times` the stall time."""
        return self._since is not None and now - self._since > times * self._stall
