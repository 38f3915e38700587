"""Each check finds the error that it is for: one is planted into a valid overlay, and must be told."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy import fit, structure
from tests.deploy.manifests import KUBERNETES, Manifest, of_kind, render, workloads
from tests.deploy.schemas import VERSIONS, schema_problems
from tests.deploy.test_manifests import CHECKS

OVERLAY = KUBERNETES / "overlays" / "spot"
Manifests = list[Manifest]


def named(manifests: Manifests, kind: str, name: str) -> Manifest:
    return next(m for m in of_kind(manifests, kind) if m["metadata"]["name"] == name)


def pod(manifests: Manifests, name: str) -> Manifest:
    return next(work for work in workloads(manifests) if work.name == name).pod


def container(manifests: Manifests, name: str = "generator") -> Manifest:
    return pod(manifests, name)["containers"][0]


def trigger(manifests: Manifests) -> Manifest:
    return named(manifests, "ScaledObject", "generator")["spec"]["triggers"][0]


def put(tree: Any, *path: Any, value: Any) -> None:
    """Sets a value deep in a tree."""
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


def replace_arg(manifests: Manifests, start: str, new: str, name: str = "generator") -> None:
    args = container(manifests, name)["args"]
    args[next(i for i, arg in enumerate(args) if arg.startswith(start))] = new


Plant = Callable[[Manifests], object]

SCHEMA: dict[str, Plant] = {
    "unknown field": lambda m: put(container(m), "imagePullPolice", value="Always"),
    "wrong type": lambda m: put(named(m, "StatefulSet", "redis"), "spec", "replicas", value="one"),
    "unknown field in a JobSet's pod": lambda m: put(container(m, "learner-leader"), "prots", value=[]),
    "unknown field of a JobSet": lambda m: put(named(m, "JobSet", "learner"), "spec", "succesPolicy", value={}),
    "unknown action of a JobSet": lambda m: put(
        named(m, "JobSet", "learner"), "spec", "failurePolicy", "rules", 0, "action", value="Stop"
    ),
    "success of no job": lambda m: put(
        named(m, "JobSet", "learner"), "spec", "successPolicy", "targetReplicatedJobs", value=["ledaer"]
    ),
    "unknown field of a ScaledObject": lambda m: put(
        named(m, "ScaledObject", "generator"), "spec", "maxReplicas", value=3
    ),
    "number where KEDA wants text": lambda m: put(trigger(m), "metadata", "threshold", value=1),
    "unknown metric type": lambda m: put(trigger(m), "metricType", value="Average"),
}  # fmt: skip

PLANTED: dict[str, tuple[str, Plant]] = {
    "selector of a workload": ("selectors", lambda m: put(
        named(m, "Deployment", "generator"), "spec", "selector", "matchLabels", "app.kubernetes.io/name", value="x")),
    "selector of a service": ("selectors", lambda m: (
        put(named(m, "Service", "reward"), "spec", "selector", value={"a": "b"}))),
    "selector of a budget": ("selectors", lambda m: put(
        named(m, "PodDisruptionBudget", "reward"), "spec", "selector", "matchLabels", value={"a": "b"})),
    "selector of a policy": ("selectors", lambda m: put(
        named(m, "NetworkPolicy", "redis"), "spec", "podSelector", "matchLabels", value={"a": "b"})),
    "spread over other pods": ("selectors", lambda m: put(
        pod(m, "reward"), "topologySpreadConstraints", 0, "labelSelector", "matchLabels", value={"a": "b"})),
    "no default policy": ("policies", lambda m: m.remove(named(m, "NetworkPolicy", "nothing-by-default"))),
    "weights out of reach": ("policies", lambda m: m.remove(named(m, "NetworkPolicy", "weights"))),
    "Redis out of reach": ("policies", lambda m: m.remove(named(m, "NetworkPolicy", "redis"))),
    "port out of range": ("ports", lambda m: put(container(m), "ports", 0, "containerPort", value=70000)),
    "port's name too long": ("ports", lambda m: put(container(m), "ports", 1, "name", value="metrics-of-offbeat")),
    "two ports of one name": ("ports", lambda m: put(container(m), "ports", 1, "name", value="grpc")),
    "service of no port": ("ports", lambda m: (
        put(named(m, "Service", "reward"), "spec", "ports", 0, "targetPort", value="gprc"))),
    "service out of range": ("ports", lambda m: (
        put(named(m, "Service", "reward"), "spec", "ports", 0, "port", value=0))),
    "probe of no port": ("ports", lambda m: put(container(m), "livenessProbe", "grpc", "port", value=50052)),
    "policy of no port": ("ports", lambda m: put(
        named(m, "NetworkPolicy", "metrics"), "spec", "ingress", 0, "ports", 0, "port", value="metric")),
    "request above limit": ("resources", lambda m: (
        put(container(m), "resources", "requests", "memory", value="1000Gi"))),
    "no limit of memory": ("resources", lambda m: container(m, "redis")["resources"]["limits"].pop("memory")),
    "no request": ("resources", lambda m: container(m, "redis")["resources"]["requests"].pop("cpu")),
    "GPUs by half": ("resources", lambda m: container(m)["resources"]["requests"].pop("nvidia.com/gpu")),
    "budget of nothing": ("disruptions", lambda m: (
        put(named(m, "PodDisruptionBudget", "reward"), "spec", "maxUnavailable", value=0))),
    "budget of all replicas": ("disruptions", lambda m: put(
        named(m, "PodDisruptionBudget", "reward"), "spec", "minAvailable", value=1)),
    "role for anything": ("rights", lambda m: m.append({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "all"},
        "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]})),
    "token": ("rights", lambda m: pod(m, "generator").pop("automountServiceAccountToken")),
    "root": ("rights", lambda m: put(pod(m, "generator"), "securityContext", "runAsUser", value=0)),
    "host's network": ("rights", lambda m: put(pod(m, "generator"), "hostNetwork", value=True)),
    "no seccomp profile": ("rights", lambda m: pod(m, "learner-leader")["securityContext"].pop("seccompProfile")),
    "writable root": ("rights", lambda m: container(m)["securityContext"].pop("readOnlyRootFilesystem")),
    "capabilities": ("rights", lambda m: container(m)["securityContext"].pop("capabilities")),
    "privileges": ("rights", lambda m: put(container(m), "securityContext", "allowPrivilegeEscalation", value=True)),
    "no account": ("references", lambda m: put(pod(m, "reward"), "serviceAccountName", value="offbaet")),
    "no config map": ("references", lambda m: m.remove(named(m, "ConfigMap", "recipe"))),
    "no key": ("references", lambda m: put(named(m, "ConfigMap", "run"), "data", value={"name": "x"})),
    "no secret": ("references", lambda m: next(
        v for v in pod(m, "reward")["volumes"] if "secret" in v)["secret"].update(secretName="rdis")),
    "no claim": ("references", lambda m: m.remove(named(m, "PersistentVolumeClaim", "runs"))),
    "no volume": ("references", lambda m: put(container(m), "volumeMounts", 0, "name", value="temp")),
    "target of scaling": ("scaling", lambda m: put(
        named(m, "ScaledObject", "generator"), "spec", "scaleTargetRef", "name", value="generators")),
    "replicas beside scaling": ("scaling", lambda m: (
        put(named(m, "Deployment", "generator"), "spec", "replicas", value=4))),
    "scaling to nothing": ("scaling", lambda m: (
        put(named(m, "ScaledObject", "reward"), "spec", "minReplicaCount", value=0))),
    "min above max": ("scaling", lambda m: (
        put(named(m, "ScaledObject", "reward"), "spec", "minReplicaCount", value=9))),
    "image": ("images", lambda m: put(container(m), "image", value="offbeat/generators:cuda")),
    "tag": ("images", lambda m: put(container(m), "image", value="offbeat/generator:gpu")),
    "another service's image": ("images", lambda m: put(container(m), "image", value="offbeat/reward:cuda")),
    "option": ("commands", lambda m: replace_arg(m, "--recipe", "--recipes=/etc/offbeat/recipe.yaml")),
    "service": ("commands", lambda m: put(container(m), "command", 2, value="generators")),
    "setting": ("commands", lambda m: (
        replace_arg(m, "--set=generator.rpc.bind", "--set=generator.rpc.binds=0.0.0.0:50051"))),
    "value of a setting": ("commands", lambda m: replace_arg(
        m, "--set=telemetry.log_format", "--set=telemetry.log_format=xml")),
    "recipe": ("commands", lambda m: (
        put(named(m, "ConfigMap", "recipe"), "data", "recipe.yaml", value="run: {name: x}"))),
    "name of a probe": ("probes", lambda m: put(container(m), "readinessProbe", "grpc", "service", value="ready")),
    "probes exchanged": ("probes", lambda m: (
        put(container(m), "livenessProbe", "grpc", "service", value="readiness"))),
    "no probe": ("probes", lambda m: container(m, "reward").pop("startupProbe")),
    "grace shorter than drain": ("grace", lambda m: (
        put(pod(m, "generator"), "terminationGracePeriodSeconds", value=20))),
    "default grace": ("grace", lambda m: pod(m, "checkpoint").pop("terminationGracePeriodSeconds")),
    "variable that nobody reads": ("environment", lambda m: (
        container(m)["env"].append({"name": "OFFBEAT_LAG", "value": "1"}))),
    "variable that is not set": ("environment", lambda m: container(m)["env"].pop(
        [v["name"] for v in container(m)["env"]].index("RUN_ID"))),
    "address of no service": ("addresses", lambda m: (
        replace_arg(m, "--set=redis.url", "--set=redis.url=redis://rdis:6379/0"))),
    "port of no service": ("addresses", lambda m: replace_arg(
        m, "--set=checkpoint.address", "--set=checkpoint.address=checkpoint:50052")),
    "port that is not bound": ("addresses", lambda m: replace_arg(
        m, "--set=generator.rpc.metrics_port", "--set=generator.rpc.metrics_port=9091")),
    "metric that nobody exports": ("metrics", lambda m: put(
        trigger(m), "metadata", "query", value="max(offbeat_learner_generator_wanted)")),
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", SCHEMA)
def test_the_schemas_find(kind: str, version: str) -> None:
    manifests = render(OVERLAY)
    SCHEMA[kind](manifests)
    # The others are valid, as another test says; to check them all again would take a second each time.
    changed = [
        found for found, fresh in zip(manifests, render(OVERLAY), strict=True) if found != fresh
    ]
    assert len(changed) == 1
    assert schema_problems(changed, version)


@pytest.mark.parametrize("kind", PLANTED)
def test_the_checks_find(kind: str) -> None:
    manifests = render(OVERLAY)
    check, plant = PLANTED[kind]
    plant(manifests)
    found = {each.__name__ for each in CHECKS if list(each(manifests))}
    assert check in found


def test_each_check_has_an_error_that_it_finds() -> None:
    assert {check for check, _ in PLANTED.values()} == {check.__name__ for check in CHECKS}
    assert structure.quantity("1536Mi") == 1536 * 2**20
    assert structure.quantity("250m") * 4 == 1
    assert fit.LEAVING_SECONDS > 0
