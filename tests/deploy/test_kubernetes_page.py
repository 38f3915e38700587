"""docs/kubernetes.md: kubectl takes its commands, what they name is there, and its sizes are those of the manifests."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import KUBECTL, KUBERNETES, OVERLAYS, ROOT, Manifest, render, workloads
from tests.deploy.schemas import VERSIONS, schema_problems
from tests.deploy.structure import quantity
from tests.harness.pages import blocks, commands

PAGE = "kubernetes"
TYPED = [command for block in blocks(PAGE, "kubectl") for command in commands(block)]
NOWHERE = "http://127.0.0.1:9"
OTHERS = {"namespace/offbeat", "pod/reader"}
KINDS = {
    "deployment": "Deployment",
    "statefulset": "StatefulSet",
    "service": "Service",
    "jobset": "JobSet",
    "job": "Job",
}


@cache
def everything() -> list[Manifest]:
    """The objects of all overlays; not to be changed."""
    return [found for overlay in OVERLAYS for found in render(KUBERNETES / "overlays" / overlay)]


def names(kind: str) -> set[str]:
    found = {m["metadata"]["name"] for m in everything() if m["kind"] == kind}
    if kind == "Job":  # of JobSets: <set>-<job>-<number>
        found |= {
            f"{m['metadata']['name']}-{job['name']}-0"
            for m in everything()
            if m["kind"] == "JobSet"
            for job in m["spec"]["replicatedJobs"]
        }
    return found


def paths(command: str) -> Iterator[Path]:
    """Files and folders of the project that a command names."""
    for word in shlex.split(command):
        if word.startswith("deploy/"):
            yield ROOT / word


@pytest.mark.parametrize("command", TYPED)
def test_kubectl_takes_the_command(command: str) -> None:
    """It gets as far as asking the API server, which is nowhere: an unknown flag or verb ends before."""
    words = shlex.split(command.removesuffix(" &"))
    assert words.pop(0) == "kubectl"
    for path in paths(command):
        assert path.exists(), path
    if any(word.startswith("https://") for word in words) or "reader.yaml" in words:
        # What it would fetch or read first is not here.
        words = [
            str(KUBERNETES / "base/common/namespace.yaml")
            if w[:8] == "https://" or w == "reader.yaml"
            else w
            for w in words
        ]
    done = subprocess.run(
        [str(KUBECTL), f"--server={NOWHERE}", *words],
        cwd=ROOT, env={"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert re.search(r"connection refused|couldn't get current server|was refused", done.stderr), (
        done.stderr
    )


@pytest.mark.parametrize("command", [c for c in TYPED if re.search(r" \w+/[\w-]+", c)])
def test_what_a_command_names_is_there(command: str) -> None:
    for kind, name in re.findall(r" ([a-z]+)/([\w-]+)", command):
        if f"{kind}/{name}" not in OTHERS and kind in KINDS:
            assert name in names(KINDS[kind]), f"{kind}/{name}"


def test_labels_that_nodes_get_are_those_that_are_asked_for() -> None:
    text = yaml.safe_dump_all(everything())
    for label in re.findall(r"(offbeat\.dev/\w+)[=:]", "\n".join(TYPED)):
        assert label in text


def test_prometheus_is_installed_where_keda_asks_for_it() -> None:
    [block] = blocks(PAGE, "helm")
    lines = [shlex.split(command) for command in commands(block)]
    added = {words[3] for words in lines if words[1:3] == ["repo", "add"]}
    installed = [words for words in lines if words[1] == "install"]
    assert {words[3].partition("/")[0] for words in installed} == added
    [prometheus] = [words for words in installed if words[3].endswith("/prometheus")]
    release, namespace = prometheus[2], prometheus[prometheus.index("--namespace") + 1]
    asked = {
        trigger["metadata"]["serverAddress"]
        for found in everything()
        if found["kind"] == "ScaledObject"
        for trigger in found["spec"]["triggers"]
    }
    assert asked == {f"http://{release}-server.{namespace}:80"}
    allowed = [
        m
        for m in everything()
        if m["kind"] == "NetworkPolicy" and m["metadata"]["name"] == "metrics"
    ]
    assert f"kubernetes.io/metadata.name: {namespace}" in yaml.safe_dump_all(allowed)


def test_images_are_made_by_targets_that_exist_and_pushed_as_they_are_named() -> None:
    [block] = blocks(PAGE, "shell")
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(block):
        words = shlex.split(command.replace(";", " ; "))
        if words[0] == "make":
            assert f"\n{words[1]}: " in makefile
        else:
            assert words[:3] == ["for", "service", "in"]
            services = words[3 : words.index(";")]
            assert all((ROOT / "services" / name / "Dockerfile").is_file() for name in services)
            assert len(services) == 4


def test_the_secrets_are_those_that_are_read() -> None:
    made = {
        (name, key)
        for name, key in re.findall(
            r"create secret generic (\w+) --from-literal=([\w-]+)=", "\n".join(TYPED)
        )
    }
    text = "\n".join(yaml.safe_dump(found) for found in everything())
    read = set(re.findall(r"secretKeyRef:\n\s+key: ([\w-]+)\n\s+name: (\w+)", text))
    assert made == {(name, key) for key, name in read} | {("redis", "password")}
    assert "secretName: redis" in text
    assert "/etc/redis-password/password" in text


def test_an_overlay_of_ones_own_names_every_image(tmp_path: Path) -> None:
    [block] = [found for found in blocks(PAGE, "yaml") if "kustomize.config" in found]
    (tmp_path / "offbeat").symlink_to(ROOT)
    mine = tmp_path / "mine"
    mine.mkdir()
    up = Path(*[".."] * len(mine.resolve().parts[1:]))
    tree = yaml.safe_load(block)
    tree["resources"] = [
        str(up / str(ROOT / each.removeprefix("../offbeat/"))[1:]) for each in tree["resources"]
    ]
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    images = {c["image"] for work in workloads(render(mine)) for c in work.containers}
    assert {image for image in images if not image.startswith("registry.example/")} == {
        "redis:7-alpine"
    }


def test_the_reader_is_a_pod_that_the_namespace_lets_in() -> None:
    [block] = blocks(PAGE, "manifest")
    pod = yaml.safe_load(block)
    for version in VERSIONS:
        assert schema_problems([pod], version) == []
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    claims = {m["metadata"]["name"] for m in everything() if m["kind"] == "PersistentVolumeClaim"}
    assert {v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"]} <= claims


def requested(overlay: str) -> dict[str, float]:
    """What all pods of an overlay ask for together; a DaemonSet's are not counted."""
    total: dict[str, float] = {}
    for work in workloads(render(KUBERNETES / "overlays" / overlay)):
        for container in work.containers:
            for name, amount in container["resources"]["requests"].items():
                total[name] = total.get(name, 0) + quantity(amount) * (work.replicas or 0)
    return total


def test_sizes_are_those_of_the_manifests() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    small = requested("cpu-demo")
    assert f"{float(small['cpu']):g} cores, {float(small['memory']) / 2**30:g} GiB" in page
    large = requested("gpu")
    assert f"{float(large['nvidia.com/gpu']):g} GPUs" in page
    rows = dict(_rows(page))
    for work in workloads(render(KUBERNETES / "overlays" / "gpu")):
        name = {
            "generator": "generators",
            "reward": "reward workers",
            "learner-leader": "learner",
        }.get(work.name)
        if name:
            asked = work.containers[0]["resources"]["requests"]
            assert f"{asked['nvidia.com/gpu']} GPU" in rows[name]
            assert f"{asked['cpu']} cores" in rows[name]
            assert asked["memory"].replace("Gi", " GiB") in rows[name]


def _rows(page: str) -> Iterator[tuple[str, Any]]:
    for line in page.splitlines():
        if line.startswith("| ") and line.count("|") == 5:
            name, _, rest = line[2:].partition(" | ")
            yield name, rest
