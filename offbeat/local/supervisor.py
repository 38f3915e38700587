"""Keeps the processes of a run alive: starts them, logs each attempt, restarts what crashed, stops all in order.

It knows nothing of what it runs: processes are data (`ProcessSpec`). Used by `offbeat.local.run`.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from offbeat.errors import ConfigError, ProcessFailed
from offbeat.local.children import Child
from offbeat.local.restarts import RestartPolicy

EXIT_CONFIG_ERROR = 2
"""Exit code by which a process says that a setting is wrong: starting it again would not help."""
EXIT_STOPPED = 143
"""Of a learner that somebody else told to stop."""

SHOWN_LINES = 15


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep alive."""

    service: str
    command: tuple[str, ...]
    index: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    finishes: bool = False
    """Exit code 0 means that the run is done. Of other processes it only means that somebody ended them."""
    stop_order: int = 0
    """Those with a small number are stopped first, and are gone before the next are asked to stop."""

    @property
    def name(self) -> str:
        """SERVICE.INDEX, as in the names of logs."""
        return f"{self.service}.{self.index}"


@dataclass
class _Kept:
    spec: ProcessSpec
    policy: RestartPolicy
    task: "asyncio.Task[None] | None" = None
    child: Child | None = None
    log: Path | None = None


class Supervisor:
    """Keeps processes alive until `stop`. Use it as an async context manager.

    `report` gets one line for each thing that a user should know. Logs are `logs`/SERVICE.INDEX.ATTEMPT.log. `env` is
    added to the environment of every process.
    """

    def __init__(
        self,
        logs: Path,
        *,
        report: Callable[[str], None] = lambda _: None,
        grace_seconds: float = 30.0,
        policy: Callable[[], RestartPolicy] = RestartPolicy,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._logs = logs
        self._env = dict(env or {})
        self._report = report
        self._grace_seconds = grace_seconds
        self._policy = policy
        self._kept: dict[str, _Kept] = {}
        self._stopping = asyncio.Event()
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> "Supervisor":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def start(self, spec: ProcessSpec) -> None:
        """Starts a process and keeps it alive."""
        kept = _Kept(spec, self._policy())
        self._kept[spec.name] = kept
        kept.task = asyncio.create_task(self._keep(kept), name=f"keep {spec.name}")
        kept.task.add_done_callback(self._task_done)

    def amend(self, spec: ProcessSpec) -> None:
        """Replaces what later attempts of the process of this name are started with."""
        self._kept[spec.name].spec = spec

    async def finished(self) -> None:
        """Returns once a process that `finishes` ended well.

        Raises `ConfigError` when a process said that its settings are wrong, and `ProcessFailed` when one crashed too
        often; both show the end of its log.
        """
        await asyncio.shield(self._outcome)

    def check(self) -> None:
        """Raises what `finished` would raise, if that has happened already."""
        if self._outcome.done():
            self._outcome.result()

    async def stop(self) -> None:
        """Stops everything: SIGTERM, then SIGKILL after the grace time, in the order of `stop_order`."""
        self._stopping.set()
        for order in sorted({kept.spec.stop_order for kept in self._kept.values()}):
            group = [kept for kept in self._kept.values() if kept.spec.stop_order == order]
            await asyncio.gather(*(self._end(kept) for kept in group))
        if self._outcome.done() and not self._outcome.cancelled():
            self._outcome.exception()  # retrieved: `finished` may never have been awaited
        else:
            self._outcome.cancel()

    async def kill(self) -> None:
        """Kills everything at once. `stop` may be under way."""
        self._stopping.set()
        await asyncio.gather(*(kept.child.kill() for kept in self._kept.values() if kept.child))

    async def _keep(self, kept: _Kept) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            kept.log = next_log(self._logs, kept.spec)
            started = loop.time()
            env = self._env | dict(kept.spec.env)
            kept.child = await Child.start(kept.spec.command, env=env, log=kept.log)
            code = await kept.child.wait()
            if self._stopping.is_set():
                return
            delay = self._judge(kept, code, loop.time() - started)
            if delay is None:
                return
            await self._pause(delay)
            if code == 0 and not self._stopping.is_set():
                self._report(f"{kept.spec.name} was ended (exit code 0); starting it again")

    def _judge(self, kept: _Kept, code: int, lived: float) -> float | None:
        """Seconds until the next start, or None when the outcome of the run is decided."""
        name, log = kept.spec.name, kept.log
        assert log is not None
        if code == 0 and kept.spec.finishes:
            self._settle(None)
            return None
        if code == EXIT_CONFIG_ERROR:
            last = last_lines(log, 1) or f"no word about it in {log}"
            self._settle(ConfigError(f"{name} refuses its settings: {last}"))
            return None
        delay = kept.policy.ended(lived, crashed=code not in {0, EXIT_STOPPED})
        if delay is None:
            self._settle(_crashed_too_often(kept, code))
            return None
        if code != 0:
            how = describe_exit(code)
            self._report(f"{name} ended with {how}; starting again in {delay:g} s; log: {log}")
        return delay

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return

    async def _end(self, kept: _Kept) -> None:
        assert kept.task is not None
        # A start may be under way, hence the loop: the child may appear only now.
        while not kept.task.done():
            if kept.child is not None and kept.child.running:
                await kept.child.stop(self._grace_seconds)
            await asyncio.wait({kept.task}, timeout=0.05)

    def _settle(self, error: Exception | None) -> None:
        if self._outcome.done():
            return
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._settle(error)  # e.g. the log can't be written


def next_log(logs: Path, spec: ProcessSpec) -> Path:
    """The log of the next attempt: numbers go on where an earlier start of the run ended."""
    numbers = [path.name.split(".")[-2] for path in logs.glob(f"{spec.name}.*.log")]
    attempt = 1 + max((int(number) for number in numbers if number.isdigit()), default=0)
    return logs / f"{spec.name}.{attempt}.log"


def last_lines(log: Path, number: int) -> str:
    """The last lines of a log that are not empty."""
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 16384))
        text = file.read().decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip()][-number:])


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code == 128 + signal.SIGKILL:
        return "SIGKILL (killed by hand, or by the kernel for want of memory)"
    if code > 128:
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            return f"exit code {code}"
    return f"exit code {code}"


def _crashed_too_often(kept: _Kept, code: int) -> ProcessFailed:
    policy, log = kept.policy, kept.log
    assert log is not None
    return ProcessFailed(
        f"{kept.spec.name} crashed {policy.quick_in_a_row} times in a row, each within {policy.quick_seconds:g} s of "
        f"its start, the last time with {describe_exit(code)}; the run is stopped. "
        f"The end of {log}:\n{last_lines(log, SHOWN_LINES)}"
    )


def with_overrides(spec: ProcessSpec, *overrides: str) -> ProcessSpec:
    """The same process with further ``--set`` arguments."""
    added = [part for override in overrides for part in ("--set", override)]
    return replace(spec, command=(*spec.command, *added))
