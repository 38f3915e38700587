"""Points at which a process can be made to fail: tests crash it between two durable actions, or fail its disk there.

``OFFBEAT_FAILPOINTS=publish.counted,…`` arms points. An item is ``NAME[:COUNT][=ACTION][@FILE]``:

    publish.counted             dies there, as by `kill -9`
    publish.counted:3           dies at the third time
    checkpoint.fsync=eio        the disk fails there (OSError EIO), once; full: no space (ENOSPC)
    publish.counted=stop        freezes there (SIGSTOP), until somebody wakes it
    publish.counted@/tmp/now    whenever the file exists, which is removed by it: armed from outside, while it runs

Without the variable a point costs next to nothing.
"""

import errno
import os
import signal
from dataclasses import dataclass

VARIABLE = "OFFBEAT_FAILPOINTS"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ERRORS = {"eio": errno.EIO, "full": errno.ENOSPC}


@dataclass
class _Armed:
    action: str
    left: int
    file: str

    def due(self) -> bool:
        """Whether it is time. A file is removed by one process only, so that one fails."""
        if self.file:
            try:
                os.unlink(self.file)
            except FileNotFoundError:
                return False
            return True
        self.left -= 1
        return self.left == 0


def parse(text: str) -> dict[str, _Armed]:
    """What the variable arms. Raises `ValueError` for an unknown action: a fault that never comes tests nothing."""
    armed = {}
    for item in filter(None, text.split(",")):
        rest, _, file = item.partition("@")
        rest, _, action = rest.partition("=")
        name, _, count = rest.partition(":")
        if action not in {"", *SIGNALS, *ERRORS}:
            known = ", ".join([*SIGNALS, *ERRORS])
            raise ValueError(f"{VARIABLE}: {item!r}: expected one of the actions {known}")
        armed[name] = _Armed(action or "kill", int(count or 1), file)
    return armed


_armed = parse(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """Fails here when `name` is armed. Raises `OSError` where the disk is to fail."""
    if not _armed or name not in _armed or not _armed[name].due():
        return
    action = _armed[name].action
    if action in ERRORS:
        raise OSError(ERRORS[action], f"{os.strerror(ERRORS[action])} (failpoint {name})")
    os.kill(os.getpid(), SIGNALS[action])
