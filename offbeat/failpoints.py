"""Points at which a process can be made to die: tests crash it between two durable actions.

``OFFBEAT_FAILPOINTS=publish.counted,…`` kills the process, as `kill -9` would, when it gets to one
of the points; ``name:3`` does so at the third time. Without the variable a point costs next to
nothing.
"""

import os
import signal

VARIABLE = "OFFBEAT_FAILPOINTS"


def _parse(text: str) -> dict[str, int]:
    armed = {}
    for item in filter(None, text.split(",")):
        name, _, count = item.partition(":")
        armed[name] = int(count or 1)
    return armed


_armed = _parse(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """Dies here when `name` is armed."""
    if not _armed or name not in _armed:
        return
    _armed[name] -= 1
    if _armed[name] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
