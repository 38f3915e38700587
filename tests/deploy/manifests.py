"""What kustomize makes of deploy/kubernetes, and the pods in it. Used by the tests of this folder."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
KUBECTL = Path(sys.executable).with_name("kubectl")
OVERLAYS = ("cpu-demo", "gpu", "gpu/prepare", "autoscale", "spot")
COMPONENTS = {"external-redis": "autoscale", "two-learner-nodes": "gpu"}
"""Component that no overlay has -> the overlay that it is tried on."""

Manifest = dict[str, Any]


@cache
def render_text(folder: Path) -> str:
    """What `kubectl apply -k FOLDER` would send."""
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(folder: Path) -> list[Manifest]:
    """The objects of a kustomization, fresh ones at each call."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where there is one: many calls
    return [found for found in yaml.load_all(render_text(folder), loader) if found]


@dataclass(frozen=True)
class Workload:
    """Something that makes pods."""

    owner: Manifest
    template: Manifest
    name: str
    replicas: int | None
    """None: not said here, or as many as there are nodes."""

    @property
    def pod(self) -> Manifest:
        """The pod's spec."""
        return self.template["spec"]

    @property
    def labels(self) -> dict[str, str]:
        """The pod's labels, those that JobSet's controller gives included."""
        return self.template["metadata"]["labels"]

    @property
    def containers(self) -> list[Manifest]:
        """Its containers, first ones included."""
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]


def of_kind(manifests: Iterable[Manifest], *kinds: str) -> list[Manifest]:
    """Those of these kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def workloads(manifests: Iterable[Manifest]) -> Iterator[Workload]:
    """Everything that makes pods."""
    for owner in manifests:
        kind, spec, name = owner["kind"], owner.get("spec", {}), owner["metadata"]["name"]
        if kind in {"Deployment", "StatefulSet", "DaemonSet", "Job"}:
            count = 1 if kind == "Job" else spec.get("replicas")
            yield Workload(owner, spec["template"], name, count)
        elif kind == "JobSet":
            for job in spec["replicatedJobs"]:
                template = job["template"]["spec"]["template"]
                labels = template.setdefault("metadata", {}).setdefault("labels", {})
                labels["jobset.sigs.k8s.io/jobset-name"] = name
                labels["jobset.sigs.k8s.io/replicatedjob-name"] = job["name"]
                yield Workload(owner, template, f"{name}-{job['name']}", job.get("replicas", 1))


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector (matchLabels, matchExpressions) selects these labels; an empty one selects all."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for wanted in selector.get("matchExpressions", []):
        found, operator = labels.get(wanted["key"]), wanted["operator"]
        values = wanted.get("values", [])
        good = {
            "In": found in values,
            "NotIn": found not in values,
            "Exists": found is not None,
            "DoesNotExist": found is None,
        }[operator]
        if not good:
            return False
    return True
