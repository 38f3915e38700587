"""How long the learner waits for results. Pure: the caller tells the time. Used by `coordinator`."""

REISSUE_SECONDS = 60.0
"""Time without a new result after which absent ordinals are looked for; also done after every outage of Redis."""
LONG_AGO_SECONDS = 60.0
"""A look that comes so long after the one before says nothing about the workers: the learner, or Redis, stood still."""


class Patience:
    """Knows which ordinals have waited for longer than `limit_seconds`.

    Time counts only while there is somebody who could do the work and nothing arrives: while results arrive the queue
    moves, and a place in it is no fault of the group; and when all workers were away, nothing is.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self._issued_at: dict[int, float] = {}
        self._counted_from = float("-inf")
        self._looked_at = float("-inf")
        self._searched_at = float("-inf")

    def issued(self, ordinal: int, now: float) -> None:
        """The ordinal was issued, perhaps not for the first time."""
        self._issued_at[ordinal] = now

    def done(self, ordinal: int) -> None:
        """Nobody waits for the ordinal any more."""
        self._issued_at.pop(ordinal, None)

    def arrived(self, now: float) -> None:
        """A result arrived."""
        self._counted_from = self._searched_at = now

    def late(self, now: float, *, possible: bool) -> list[int]:
        """Ordinals that have waited for too long; each is told once. Ask often: every second or so.

        `possible`: there are workers of all kinds that a result needs.
        """
        stood_still = now - self._looked_at > LONG_AGO_SECONDS
        self._looked_at = now
        if stood_still or not possible:
            self._counted_from = now
        found = [
            ordinal
            for ordinal, at in self._issued_at.items()
            if now - max(at, self._counted_from) > self.limit_seconds
        ]
        for ordinal in found:
            del self._issued_at[ordinal]
        return found

    def should_search(self, now: float) -> bool:
        """Whether it is time to look for ordinals that got lost: once in a while without results."""
        if self._searched_at == float("-inf"):
            self._searched_at = now
        if now - self._searched_at <= REISSUE_SECONDS:
            return False
        self._searched_at = now
        return True
