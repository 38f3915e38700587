"""Stands between the supervisor and one service, and sees to it that nothing of the service is left behind.

`offbeat.local.children` runs this file as a script, one process per service. It imports nothing but a few modules
of the standard library, so that it starts in a few hundredths of a second.

What it does: its standard input is a pipe whose other end only the supervisor holds. The first line is the command,
as a JSON list. The end of the input means that the supervisor is gone (even by SIGKILL) or wants the service killed.
Then, and also when the service ends by itself, every process below this one is killed. As a child subreaper it
inherits the service's orphans, so that grandchildren in sessions of their own (torchrun's workers) are found too.

SIGTERM, SIGINT and SIGHUP are passed on to the service alone, not to its children: an engine process must live until
its service has drained. The exit code is the service's, or 128 + the number of the signal that ended it.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KILL_SECONDS = 30.0
"""How long the kernel may take to end killed processes; some wait for a disk or a device."""

EXIT_NOT_STARTED = 127


def main() -> int:
    """Runs one command and returns the exit code for this process."""
    command = json.loads(_first_line(0))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeups = _catch_signals()
    child = _start(command)
    status = _wait(child, wakeups)
    status = _kill_all(child, status)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _first_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 65536)
        if not byte:
            sys.exit(EXIT_NOT_STARTED)  # the supervisor died before it said what to run
        line += byte
    return line


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _catch_signals() -> int:
    """Turns signals into bytes on the file descriptor that is returned."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (*PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reading


def _start(command: list[str]) -> int:
    keeper = os.getpid()
    # No signal may reach the child before it has the default handlers: it would be swallowed.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    child = os.fork()
    if child == 0:
        _become(command, keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    return child


def _become(command: list[str], keeper: int) -> None:
    """In the child: turns into the command, which dies with this keeper."""
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(EXIT_NOT_STARTED)
        for number in (*PASSED_ON, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"can't start {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(EXIT_NOT_STARTED)


def _wait(child: int, wakeups: int) -> int | None:
    """Waits until the child has ended and returns its status, or None when it is to be killed."""
    while True:
        ready, _, _ = select.select([0, wakeups], [], [])
        if wakeups in ready:
            for number in os.read(wakeups, 4096):
                if number in PASSED_ON:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, number)
            status = _reap(child)
            if status is not None:
                return status
        # The supervisor writes nothing after the command: readable means that it let go of the pipe.
        if 0 in ready and not os.read(0, 4096):
            return None


def _reap(child: int) -> int | None:
    """Collects ended processes, adopted ones too; the status of `child` when it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = status
    return found


def _kill_all(child: int, status: int | None) -> int:
    """Kills what is left below this process; returns the child's status."""
    end = time.monotonic() + KILL_SECONDS
    while descendants := _descendants(os.getpid()):
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = _reap(child)
        status = status if ended is None else ended
        if time.monotonic() > end:
            break
        time.sleep(0.005)
    return signal.SIGKILL if status is None else status


def _descendants(root: int) -> list[int]:
    """Processes below `root`, those that have ended and were not collected included."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name in parentheses may contain anything; the parent is the second field after it.
                parent = file.read().rpartition(b")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


if __name__ == "__main__":
    sys.exit(main())
