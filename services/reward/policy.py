"""When a reward worker stops on its own, and when it may say that it is alive. Pure: the caller tells the time."""

from collections.abc import Hashable


class StopPolicy:
    """Tells a bad group from a bad function.

    A function that fails on one group's content costs that group. A function that fails on `limit` different groups
    in a row, without one group in between that was scored, is taken to be broken: going on would give up every
    group of the run, one by one.
    """

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._function = ""
        self._groups: set[Hashable] = set()

    def scored(self) -> None:
        """A group was scored."""
        self._groups.clear()

    def failed(self, function: str, group: Hashable) -> None:
        """`function` failed on `group`, which was scored by itself."""
        if function != self._function:
            self._function = function
            self._groups.clear()
        self._groups.add(group)

    @property
    def broken_function(self) -> str | None:
        """The function that is taken to be broken, if there is one."""
        return self._function if len(self._groups) >= self._limit else None

    @property
    def limit(self) -> int:
        """Number of groups in a row that a function may fail on."""
        return self._limit


class Watchdog:
    """Allows heartbeats only while work goes on: a sign of life without progress would hide a wedged worker."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._since: float | None = None

    def progress(self, now: float) -> None:
        """Something was started or finished."""
        self._since = now

    def idle(self) -> None:
        """Nothing is under way."""
        self._since = None

    def alive(self, now: float) -> bool:
        """Whether nothing is under way, or there was progress within the limit."""
        return self._since is None or now - self._since <= self._limit
