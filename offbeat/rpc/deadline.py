"""A process that hangs ends itself. Used by the services' entry code.

The timer runs in a thread of the interpreter that needs neither the event loop nor the interpreter's lock, so it goes
off however the process hangs: with the stacks of all threads in its log, and exit code 1, after which whoever started
the process starts it again.
"""

import faulthandler

LOOP_SECONDS = 60.0
"""Shortest time for which an event loop may stand still: a busy machine is no hang."""
END_SECONDS = 60.0
"""Time for the end of a process, once its work is done or handed back."""


def loop_turns(limit_seconds: float) -> None:
    """Says that the event loop turns. Without the next call within `limit_seconds` the process ends itself."""
    faulthandler.dump_traceback_later(max(LOOP_SECONDS, limit_seconds), exit=True)


def end_in_time(seconds: float = END_SECONDS) -> None:
    """The process is about to end; it does within `seconds`, even if a thread or a connection would hold it up."""
    faulthandler.dump_traceback_later(seconds, exit=True)
