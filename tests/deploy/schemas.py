"""Strict schema validation of manifests, offline. Returns problems as text."""

from collections.abc import Iterable

import kubernetes_validate
from pydantic import ValidationError

from tests.deploy.custom import KINDS
from tests.deploy.manifests import Manifest

VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""The oldest Kubernetes that is supported, and the newest that there are schemas of."""


def schema_problems(manifests: Iterable[Manifest], version: str) -> list[str]:
    """What the API server of this version would refuse."""
    problems = []
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        typed = KINDS.get(manifest["kind"])
        if typed is not None:
            try:
                typed.model_validate(manifest)
            except ValidationError as error:
                problems += [f"{name}: {item['loc']}: {item['msg']}" for item in error.errors()]
        for part in _built_in(manifest):
            try:
                kubernetes_validate.validate(part, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                problems.append(f"{name}: {error.path}: {error.message}")
    return problems


def _built_in(manifest: Manifest) -> list[Manifest]:
    """The parts that Kubernetes itself knows: all of it, or the jobs of a JobSet."""
    if manifest["kind"] == "JobSet":
        return [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": job["name"]},
                **job["template"],
            }
            for job in manifest["spec"].get("replicatedJobs", [])
            if "spec" in job.get("template", {})
        ]
    return [] if manifest["kind"] in KINDS else [manifest]
