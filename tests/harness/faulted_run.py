"""A whole run among things that can be broken: its own Redis, proxies, failpoints that are armed from outside.

    all services --> proxy --> Redis
    learner, generators --> proxy --> checkpoint service

with faulted_run(folder, schedule={"max_lag": 1}) as run:
    run.wait_for_step(3)
    recovered = fault.strike(run, random.Random(1))  # see `tests.harness.faults`
    run.wait_until(recovered, "the recovery")

Times are real. The engine is the deterministic one unless `generator` names another.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from offbeat.failpoints import VARIABLE
from offbeat.local.redis_server import MIB, RedisServer, free_port
from offbeat.streams.base import Stream
from offbeat.streams.keys import GROUPS, SOURCES, Keys, Role
from tests.harness.proxy import ProxyThread
from tests.harness.whole_run import DETERMINISTIC, WholeRun, merge, write_recipe

FAILPOINTS = {
    "publish.sending": "kill",
    "learner.published": "kill",
    "checkpoint.before_rename": "kill",
    "checkpoint.before_committed": "kill",
    "checkpoint.after_committed": "kill",
    "checkpoint.fsync": "eio",
    "publish.received": "kill",
    "publish.counted": "kill",
    "publish.moved": "kill",
    "publish.manifest_renamed": "kill",
    "publish.fsync": "full",
}
"""Points that can be armed while the run goes on -> what happens there."""

MIN_IDLE_SECONDS = 1.0
MANY_STEPS = 1_000_000
"""More than anybody waits for: the run is ended when all faults are through."""
ROLES: tuple[Role, ...] = ("generator", "reward")
POLL_SECONDS = 0.05


def recipe_sections(redis_url: str, checkpoint_port: int, proxy: str) -> dict[str, Any]:
    """What a run needs whose servers are reached through proxies, and that is to be back quickly."""
    return {
        "run": {"max_quick_crashes": 100_000, "max_restart_seconds": 1.0},
        "schedule": {"steps": MANY_STEPS, "prompts_per_step": 16},
        "generator": {"replicas": 2, "engine": DETERMINISTIC | {"token_seconds": 0.005}},
        "reward": {"replicas": 2, "max_groups": 4},
        "learner": {"checkpoints": {"every_steps": 3}},
        "checkpoint": {
            "rpc": {"bind": f"127.0.0.1:{checkpoint_port}", "advertise": proxy},
            "same_host_files": False,
        },
        "redis": {
            **{"url": redis_url, "min_idle_seconds": MIN_IDLE_SECONDS, "beat_seconds": 0.2},
        },
        "telemetry": {
            "tensorboard": False,
            "samples": {"groups_per_step": 1000, "max_mb": 4096},
        },
    }


class FaultedRun(WholeRun):
    """A running `offbeat run`, with handles to break what it stands on. Made by `faulted_run`."""

    def __init__(
        self,
        recipe: Path,
        environment: dict[str, str],
        *,
        server: RedisServer,
        redis_proxy: ProxyThread,
        weights_proxy: ProxyThread,
        failpoints: Path,
        replicas: dict[str, int],
    ) -> None:
        self.recipe = recipe
        self.server = server
        self.redis_proxy = redis_proxy
        self.weights_proxy = weights_proxy
        self.replicas = replicas
        self.client = redis.Redis.from_url(server.url, socket_timeout=5.0)
        """Looks at the server itself, past the proxy."""
        self._failpoints = failpoints
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._read = 0
        self.lines: list[dict[str, Any]] = []
        """Lines of metrics.jsonl so far."""
        self.spared: set[int] = set()
        """Workers that no fault hits."""
        super().__init__(recipe, ["run", str(recipe)], environment)

    @property
    def pid(self) -> int:
        """Of the command itself."""
        return self._process.pid

    @property
    def redis_pid(self) -> int:
        """Of Redis; 0 while it is down."""
        return 0 if self.server.process is None else self.server.process.pid

    # --- time

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does it then, if `poll` is called often enough."""
        self._due.append((time.monotonic() + seconds, action))

    def poll(self) -> None:
        """Reads what is new, and does what is due. Fails when the run has ended."""
        now = time.monotonic()
        due = [action for at, action in self._due if at <= now]
        self._due = [item for item in self._due if item[0] > now]
        for action in due:
            action()
        self._read_lines()
        assert self._process.poll() is None, f"the run ended:\n{self.output()}"

    def wait_until(self, holds: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
        """Polls until `holds()`. Raises AssertionError that names `what` after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            self.poll()
            if holds():
                return
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}:\n{self.output()}"
            time.sleep(POLL_SECONDS)

    # --- what the run has done

    def _read_lines(self) -> None:
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return
        with file.open("rb") as opened:
            opened.seek(self._read)
            whole, newline, _ = opened.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        self.lines += [json.loads(line) for line in whole.split(b"\n") if line]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of the steps, those that were trained again twice."""
        return [line for line in self.lines if line["kind"] == "step"]

    def step(self) -> int:
        """The largest step so far."""
        self._read_lines()
        return max((line["step"] for line in self.steps), default=0)

    @property
    def term(self) -> int:
        """The newest term that trained a step."""
        return max((line["term"] for line in self.steps), default=0)

    # --- who holds what

    @property
    def keys(self) -> Keys:
        """Names of what the run keeps in Redis."""
        return Keys(self.folder.name)

    def consumers(self, role: Role) -> set[str]:
        """Names of the workers whose last heartbeat is younger than the minimum idle time."""
        alive_since = (time.time() - MIN_IDLE_SECONDS) * 1000
        found = self.client.zrangebyscore(self.keys.members(role), alive_since, "+inf")
        return {name.decode() for name in found}

    def held_by(self, role: Role, pid: int) -> set[tuple[str, bytes]]:
        """(stream, entry id) of what the worker of this process id holds."""
        held = set()
        for stream in SOURCES[role]:
            key = self.keys.stream(stream)
            rows = self.client.xpending_range(key, GROUPS[stream], "-", "+", 10_000)
            held |= {(key, row["message_id"]) for row in rows if _is(row["consumer"], pid)}
        return held

    def all_work(self, role: Role) -> bool:
        """Whether all processes of a role are there and beating."""
        pids, names = self.pids(role), self.consumers(role)
        there = [pid for pid in pids if any(_is(name, pid) for name in names)]
        return len(there) >= self.replicas[role]

    def backlog(self) -> int:
        """Entries on all streams that are still to be worked on."""
        streams = [stream for stream in Stream if stream is not Stream.DEAD]
        return sum(self.client.xlen(self.keys.stream(stream)) for stream in streams)

    # --- breaking things

    def arm(self, failpoint: str) -> Callable[[], bool]:
        """Arms a failpoint; returns whether it went off."""
        file = self._failpoints / failpoint
        file.touch()
        return lambda: not file.exists()

    def empty_redis(self) -> None:
        """Kills Redis, whose data is lost, and starts it again."""
        self.server.kill()
        shutil.rmtree(self.server.log.parent / "appendonlydir", ignore_errors=True)
        for file in self.server.log.parent.glob("*.aof"):  # where servers before 7.0 put it
            file.unlink()
        self.server.start()

    def close(self) -> None:
        """Ends the run."""
        if self._process.poll() is None:
            for pid in [pid for role in ROLES for pid in self.pids(role)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)  # one that is frozen can't end
        self.client.close()
        super().close()


def _is(consumer: bytes | str, pid: int) -> bool:
    """Whether a consumer's name is that of the worker with this process id."""
    name = consumer if isinstance(consumer, str) else consumer.decode()
    return name.startswith(f"{socket.gethostname()}-{pid}.")


@contextlib.contextmanager
def faulted_run(
    folder: Path, *, redis_binary: str | None = None, **sections: Any
) -> Iterator[FaultedRun]:
    """Starts the run and what it stands on; ends all of it when the block ends."""
    failpoints = folder / "failpoints"
    failpoints.mkdir(parents=True)
    armed = ",".join(f"{name}={do}@{failpoints / name}" for name, do in FAILPOINTS.items())
    server = RedisServer(folder / "redis", binary=redis_binary, max_memory_bytes=256 * MIB)
    checkpoint_port = free_port()
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        redis_proxy = stack.enter_context(ProxyThread(server.url.split("/")[2]))
        weights_proxy = stack.enter_context(ProxyThread(f"127.0.0.1:{checkpoint_port}"))
        tree = recipe_sections(
            f"redis://{redis_proxy.address}/0", checkpoint_port, weights_proxy.address
        )
        merge(tree, sections)
        run = FaultedRun(
            write_recipe(folder, **tree),
            {VARIABLE: armed},
            server=server,
            redis_proxy=redis_proxy,
            weights_proxy=weights_proxy,
            failpoints=failpoints,
            replicas={role: tree[role]["replicas"] for role in ROLES},
        )
        stack.callback(run.close)
        yield run
