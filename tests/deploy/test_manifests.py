"""deploy/kubernetes: every overlay is valid for the API server, fits together, and fits the code."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.config import Recipe, load_recipe
from tests.deploy import fit, structure
from tests.deploy.manifests import (
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    Manifest,
    of_kind,
    render,
    workloads,
)
from tests.deploy.schemas import VERSIONS, schema_problems

CHECKS = (*structure.CHECKS, *fit.CHECKS)


def rendered(overlay: str) -> list[Manifest]:
    return render(KUBERNETES / "overlays" / overlay)


def problems(manifests: list[Manifest]) -> list[str]:
    return [problem for check in CHECKS for problem in check(manifests)]


def with_component(component: str, folder: Path) -> list[Manifest]:
    """The overlay that COMPONENTS names, with the component on top."""
    up = Path(*[".."] * len(folder.resolve().parts[1:]))
    tree = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [str(up / f"{KUBERNETES}/overlays/{COMPONENTS[component]}"[1:])],
        "components": [str(up / f"{KUBERNETES}/components/{component}"[1:])],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    return render(folder)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_server_would_take_it(overlay: str, version: str) -> None:
    assert schema_problems(rendered(overlay), version) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_it_fits_together_and_the_code(overlay: str) -> None:
    assert problems(rendered(overlay)) == []


@pytest.mark.parametrize("component", COMPONENTS)
def test_components_fit_too(component: str, tmp_path: Path) -> None:
    manifests = with_component(component, tmp_path)
    assert [p for version in VERSIONS for p in schema_problems(manifests, version)] == []
    assert problems(manifests) == []


def test_two_nodes_of_the_learner_differ_only_in_what_makes_them_two(tmp_path: Path) -> None:
    learner = of_kind(with_component("two-learner-nodes", tmp_path), "JobSet")[0]
    leader, other = (work.containers[0] for work in workloads([learner]))
    alone = {"--node=0", "--node=1"}
    both = [
        {arg for arg in container["args"] if ".rpc." not in arg} for container in (leader, other)
    ]
    assert both[0] - alone == both[1] - alone
    assert (both[0] & alone, both[1] & alone) == ({"--node=0"}, {"--node=1"})
    for key in ("image", "resources", "volumeMounts", "env", "securityContext"):
        assert leader[key] == other[key], key
    assert not {"livenessProbe", "ports"} & set(other), "only rank 0 serves"


def test_an_external_redis_takes_the_place_of_the_own(tmp_path: Path) -> None:
    manifests = with_component("external-redis", tmp_path)
    assert [work.name for work in workloads(manifests) if work.name == "redis"] == []
    service = next(m for m in of_kind(manifests, "Service") if m["metadata"]["name"] == "redis")
    assert service["spec"]["type"] == "ExternalName"


@pytest.mark.parametrize(
    ("overlay", "original", "changed"),
    [
        ("cpu-demo", "arithmetic_tiny", {"model", "prepare"}),
        (
            "gpu",
            "paper/no_robots_llama31_8b",
            {"model", "prepare", "learner", "generator", "reward", "redis"},
        ),
    ],
)
def test_a_recipe_is_that_of_recipes(overlay: str, original: str, changed: set[str]) -> None:
    text = next(
        m["data"]["recipe.yaml"]
        for m in of_kind(rendered(overlay), "ConfigMap")
        if m["metadata"]["name"] == "recipe"
    )
    here = yaml.safe_load(text)
    there = yaml.safe_load((ROOT / f"recipes/{original}.yaml").read_text())
    assert {key for key in {*here, *there} if here.get(key) != there.get(key)} <= changed
    assert _learning(here["learner"]) == _learning(there["learner"])
    names = [[f["name"] for f in tree["reward"]["functions"]] for tree in (here, there)]
    assert names[0] == names[1]


def _learning(section: dict[str, Any]) -> dict[str, Any]:
    """The learner's settings but for the machines."""
    return {key: value for key, value in section.items() if key not in {"ranks", "devices"}}


def test_a_learner_asks_for_the_gpus_of_its_ranks() -> None:
    manifests = rendered("gpu")
    work = next(w for w in workloads(manifests) if w.name == "learner-leader")
    recipe: Recipe = fit.settings(manifests, work.containers[0])
    assert int(work.containers[0]["resources"]["limits"]["nvidia.com/gpu"]) == recipe.learner.ranks


def test_the_environment_of_the_code_is_found() -> None:
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "HF_HUB_OFFLINE"} & fit.read_by_code()


def test_recipes_of_overlays_load_as_files() -> None:
    for path in sorted((KUBERNETES / "overlays").rglob("recipe.yaml")):
        assert load_recipe(path, ["run.id=x"]).schedule.steps > 0
