"""docs/grpcurl.md: its commands fit the contracts, and work as typed against a run of the default recipe."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2

from offbeat.v1 import checkpoint_pb2, generator_pb2, learner_pb2, reward_pb2
from tests.harness.pages import blocks, commands
from tests.harness.whole_run import start

ROOT = Path(__file__).parents[2]
SETUP, *TYPED = blocks("grpcurl", "sh")
COMMANDS = [command for block in TYPED for command in commands(block)]
CONTRACTS = (health_pb2, checkpoint_pb2, generator_pb2, learner_pb2, reward_pb2)
"""Imported for what they add to the descriptor pool."""
LAST = {"GeneratorService/Drain", "LearnerService/Stop"}
"""Methods that end something."""


def answer_of(command: str) -> tuple[str, str]:
    """The command, and what its comment says is in the answer."""
    typed, _, expected = command.rpartition("  # ")
    return typed, expected


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_comes_back(command: str) -> None:
    typed, expected = answer_of(command)
    assert typed
    assert expected


@pytest.mark.parametrize("command", [c for c in COMMANDS if "/" in c and "grpcurl" in c])
def test_a_call_fits_the_contract(command: str) -> None:
    """The method exists, and the request is one of its own."""
    typed, _ = answer_of(command)
    words = shlex.split(typed.partition("|")[0].replace("'$RUN_ID'", "mine"))
    service, _, name = words[-1].partition("/")
    pool = descriptor_pool.Default()
    method = pool.FindServiceByName(service).methods_by_name[name]
    data = words[words.index("-d") + 1] if "-d" in words else "{}"
    json_format.ParseDict(json.loads(data), message_factory.GetMessageClass(method.input_type)())


def test_every_service_and_every_method_for_people_is_shown() -> None:
    text = "\n".join(COMMANDS)
    not_for_people = {"AcquireLearner", "Publish", "Fetch", "Applied"}
    for name in ("checkpoint", "generator", "reward", "learner"):
        service = descriptor_pool.Default().FindServiceByName(
            f"offbeat.v1.{name.capitalize()}Service"
        )
        for method in set(service.methods_by_name) - not_for_people:
            assert f"{service.name}/{method}" in text


def test_places_of_compose_and_kubernetes_name_what_is_there() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    [compose] = blocks("grpcurl", "compose")
    for name, port in re.findall(r"(\w+) (50051)\)", compose):
        assert any(entry.endswith(f":{port}") for entry in services[name]["ports"])
    [kubernetes] = blocks("grpcurl", "kubernetes")
    kinds = {"statefulset": "StatefulSet", "deployment": "Deployment", "service": "Service"}
    for kind, name in re.findall(r"port-forward (\w+)/(\w+)", kubernetes):
        text = (ROOT / f"deploy/kubernetes/base/{name}.yaml").read_text()
        found = [each for each in yaml.safe_load_all(text) if each["kind"] == kinds[kind]]
        assert name in {each["metadata"]["name"] for each in found}


@pytest.mark.slow
def test_the_commands_work_as_typed(tmp_path):
    shutil.copy(ROOT / "recipes" / "arithmetic_tiny.yaml", tmp_path / "recipe.yaml")
    shutil.copytree(ROOT / "recipes" / "arithmetic_tiny", tmp_path / "arithmetic_tiny")
    overrides = ("schedule.steps=4000", "evaluation.prompts=8", "evaluation.prompts_during=8")
    with start(tmp_path / "recipe.yaml", *overrides) as run:
        run.wait_for_step(2)
        ordered = sorted(COMMANDS, key=lambda command: any(name in command for name in LAST))
        for command in ordered:
            _type(command, tmp_path)


def _type(command: str, folder: Path) -> None:
    typed, expected = answer_of(command)
    tools = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", f"{SETUP}\n{typed}"],
        cwd=folder,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{typed}\n{done.stdout}\n{done.stderr}"
    assert expected in done.stdout, f"{typed}\n{done.stdout}\n{done.stderr}"
