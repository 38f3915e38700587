"""When a process that ended is started again: a pure state machine, one per process. Used by the supervisor."""

from dataclasses import dataclass


@dataclass
class RestartPolicy:
    """Exponential back-off, and an end to it: `max_quick` quick crashes in a row are too many.

    A crash is quick when the process lived for less than `quick_seconds`. A longer life shows that it can work, so it
    forgives what was before. A clean end (exit code 0) that nobody asked for is never one too many, as an operator's
    `kill` is no fault of the process; it waits longer, as a worker may also end because the run is finished, a moment
    before the learner does.
    """

    max_quick: int = 5
    quick_seconds: float = 60.0
    first_delay: float = 0.5
    max_delay: float = 30.0
    clean_delay: float = 3.0
    quick_in_a_row: int = 0
    _delay: float = 0.0

    def ended(self, lived_seconds: float, *, crashed: bool) -> float | None:
        """The process ended by itself. Returns the seconds to wait before its next start; None: give up."""
        if lived_seconds >= self.quick_seconds:
            self.quick_in_a_row = 0
            self._delay = 0.0
        if not crashed:
            return self.clean_delay
        if lived_seconds < self.quick_seconds:
            self.quick_in_a_row += 1
            if self.quick_in_a_row >= self.max_quick:
                return None
        self._delay = min(self.max_delay, self._delay * 2 or self.first_delay)
        return self._delay
