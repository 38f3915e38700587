"""A child process that dies with its parent, its own children included. Used by the supervisor and the tools.

Each child runs under a keeper of its own (`offbeat.local.keeper`), in a session of its own: Ctrl-C at a terminal
reaches the parent only, which then stops its children in the right order.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

KEEPER = Path(__file__).with_name("keeper.py")
KILL_SECONDS = 35.0
"""Longer than the keeper's own limit; past it the process group is killed from here."""


class Child:
    """One running command. Make it with `start`; `stop` or `kill` it when it is not needed any more."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> "Child":
        """Starts `command`, with `env` added to this process's environment.

        Its output goes to the new file `log`, or where this process's own goes. Raises `OSError` when the log can't
        be written; a command that can't be started ends with code 127 and a line that says why.
        """
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("xb"))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(KEEPER)),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        child = cls(process)
        # The command travels over the pipe: on the keeper's command line, it would look like a second service.
        with contextlib.suppress(ConnectionError):
            assert process.stdin is not None
            process.stdin.write(json.dumps(list(command)).encode() + b"\n")
            await process.stdin.drain()
        return child

    @property
    def keeper_pid(self) -> int:
        """Process id of the keeper, which has the same life as the command."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet, as far as this process knows."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Waits for the end, also of everything below; returns the exit code, 128 + n for signal n."""
        code = await self._process.wait()
        if code < 0:
            # The keeper itself was killed. Its child dies with it; what that child started is in the same group.
            self._kill_group()
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """Asks the command to end (SIGTERM)."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def kill(self) -> int:
        """Kills the command and all below it (SIGKILL); returns the exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return await asyncio.wait_for(self.wait(), KILL_SECONDS)
        except TimeoutError:
            self._kill_group()
            return await self.wait()

    async def stop(self, grace_seconds: float) -> int:
        """SIGTERM, then SIGKILL once `grace_seconds` have passed; returns the exit code."""
        self.terminate()
        try:
            return await asyncio.wait_for(self.wait(), grace_seconds)
        except TimeoutError:
            return await self.kill()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
