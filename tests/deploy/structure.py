"""What no schema sees: whether the objects of a deployment fit each other. Each check returns problems as text."""

from collections.abc import Callable, Iterator
from decimal import Decimal

from tests.deploy.manifests import Manifest, Workload, matches, of_kind, workloads

SECRETS = {"redis": {"password"}, "hub": {"token"}, "judge": {"api-key"}}
"""Made by hand, as docs/kubernetes.md says: name -> keys."""
CLAIMS_BEFORE = {"models"}
"""Made by overlays/gpu/prepare, before the overlays that use it."""
UNITS = {"": 1, "m": Decimal("0.001"), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str | int) -> Decimal:
    """A Kubernetes quantity as a number."""
    text = str(text)
    number = text.rstrip("KMGTikm")
    return Decimal(number) * UNITS[text[len(number) :]]


def selectors(manifests: list[Manifest]) -> Iterator[str]:
    """Selectors select pods; a workload's its own."""
    found = list(workloads(manifests))
    whole = bool(of_kind(manifests, "Deployment"))  # not just what comes first
    for work in found:
        selector = work.owner["spec"].get("selector")
        if selector is not None and not matches(selector, work.labels):
            yield f"{work.name}: its selector does not select its own pods"
        for spread in work.pod.get("topologySpreadConstraints", []):
            if not matches(spread["labelSelector"], work.labels):
                yield f"{work.name}: the spread over {spread['topologyKey']} counts other pods"
    for kind, key in (
        ("Service", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        for owner in of_kind(manifests, kind):
            spec, name = owner["spec"], f"{kind}/{owner['metadata']['name']}"
            if spec.get("type") == "ExternalName":
                continue
            selector = {"matchLabels": spec[key]} if kind == "Service" else spec[key]
            if whole and not any(matches(selector, work.labels) for work in found):
                yield f"{name}: selects no pod"


def policies(manifests: list[Manifest]) -> Iterator[str]:
    """All traffic is refused unless a policy allows it, and every connection of the services is allowed."""
    found = of_kind(manifests, "NetworkPolicy")
    closed = [p for p in found if not p["spec"]["podSelector"] and "ingress" not in p["spec"]]
    if not any(set(p["spec"]["policyTypes"]) == {"Ingress", "Egress"} for p in closed):
        yield "NetworkPolicy: none refuses everything by default"
    pods = {w.labels.get("app.kubernetes.io/name", w.name): w.labels for w in workloads(manifests)}
    wanted = [("generator", "checkpoint", "grpc"), ("learner", "checkpoint", "grpc")]
    wanted += [("relay", "checkpoint", "grpc"), ("generator", "relay", "grpc")]
    wanted += [
        (name, "redis", "redis") for name in ("checkpoint", "generator", "reward", "learner")
    ]
    for source, target, port in wanted:
        if (
            source in pods
            and target in pods
            and not _allowed(found, pods[source], pods[target], port)
        ):
            yield f"NetworkPolicy: {source} can't reach {port} of {target}"


def _allowed(
    found: list[Manifest], source: dict[str, str], target: dict[str, str], port: str
) -> bool:
    return any(
        any(matches(peer["podSelector"], source) for peer in rule["from"] if "podSelector" in peer)
        and any(given["port"] == port for given in rule.get("ports", [{"port": port}]))
        for policy in found
        if matches(policy["spec"]["podSelector"], target)
        for rule in policy["spec"].get("ingress", [])
    )


def ports(manifests: list[Manifest]) -> Iterator[str]:
    """Numbers in range, names short and unique; services, probes and policies name ports that are there."""
    found = list(workloads(manifests))
    for work in found:
        for container in work.containers:
            given = container.get("ports", [])
            names = [port.get("name", "") for port in given]
            if len(set(names)) < len(names):
                yield f"{work.name}: two ports have one name"
            for port in given:
                if not 1 <= port["containerPort"] <= 65535:
                    yield f"{work.name}: port {port['containerPort']} is out of range"
                if len(port.get("name", "")) > 15:
                    yield f"{work.name}: the port's name {port['name']} is longer than 15 characters"
            numbers = {port["containerPort"] for port in given} | set(names)
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                for handler in ("grpc", "tcpSocket", "httpGet"):
                    asked = container.get(probe, {}).get(handler, {}).get("port")
                    if asked is not None and asked not in numbers:
                        yield f"{work.name}: {probe} asks port {asked}, which is not there"
    for service in of_kind(manifests, "Service"):
        selected = [
            w
            for w in found
            if matches({"matchLabels": service["spec"].get("selector", {})}, w.labels)
        ]
        for port in service["spec"].get("ports", []):
            if not 1 <= port["port"] <= 65535:
                yield f"Service/{service['metadata']['name']}: port {port['port']} is out of range"
            if selected and not any(port.get("targetPort") in _names(w) for w in selected):
                yield f"Service/{service['metadata']['name']}: no pod has port {port.get('targetPort')}"
    for policy in of_kind(manifests, "NetworkPolicy"):
        selected = [w for w in found if matches(policy["spec"]["podSelector"], w.labels)]
        for rule in policy["spec"].get("ingress", []):
            for port in rule.get("ports", []):
                if selected and not any(port["port"] in _names(w) for w in selected):
                    yield f"NetworkPolicy/{policy['metadata']['name']}: no pod has port {port['port']}"


def _names(work: Workload) -> set[str | int]:
    given = [port for container in work.containers for port in container.get("ports", [])]
    return {port.get("name") for port in given} | {port["containerPort"] for port in given}


def resources(manifests: list[Manifest]) -> Iterator[str]:
    """Every container asks for CPU and memory, has a limit of memory, and no request above its limit."""
    for work in workloads(manifests):
        for container in work.containers:
            given = container.get("resources", {})
            requests, limits = given.get("requests", {}), given.get("limits", {})
            for name in {"cpu", "memory"} - set(requests):
                yield f"{work.name}: requests no {name}"
            if "memory" not in limits:
                yield f"{work.name}: has no limit of memory"
            for name in set(requests) & set(limits):
                if quantity(requests[name]) > quantity(limits[name]):
                    yield f"{work.name}: requests more {name} than its limit"
            for name in {name for name in {*requests, *limits} if "/" in name}:
                if requests.get(name) != limits.get(name):
                    yield f"{work.name}: {name} must be requested and limited alike"


def disruptions(manifests: list[Manifest]) -> Iterator[str]:
    """A budget lets at least one pod go, or no node could be drained."""
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        name, spec = budget["metadata"]["name"], budget["spec"]
        for work in workloads(manifests):
            if not matches(spec["selector"], work.labels):
                continue
            replicas = work.replicas or 1
            if str(spec.get("maxUnavailable", "1")) in {"0", "0%"}:
                yield f"PodDisruptionBudget/{name}: maxUnavailable 0 never lets a node be drained"
            least = spec.get("minAvailable", 0)
            if isinstance(least, str):
                least = -(-replicas * int(least.rstrip("%")) // 100)
            if least >= replicas:
                yield f"PodDisruptionBudget/{name}: minAvailable {least} of {replicas} never lets a node be drained"


def rights(manifests: list[Manifest]) -> Iterator[str]:
    """No pod talks to the API server, so none has a role or a token; pods are closed as `restricted` asks."""
    for role in of_kind(manifests, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"):
        yield f"{role['kind']}/{role['metadata']['name']}: no service needs rights"
    for work in workloads(manifests):
        pod, name = work.pod, work.name
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name}: mounts a token of the API server"
        general = pod.get("securityContext", {})
        if general.get("runAsNonRoot") is not True or not general.get("runAsUser"):
            yield f"{name}: may run as root"
        if general.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{name}: has no seccomp profile"
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(key):
                yield f"{name}: {key}"
        for container in work.containers:
            own = container.get("securityContext", {})
            if own.get("readOnlyRootFilesystem") is not True:
                yield f"{name}: its root file system is writable"
            if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
                yield f"{name}: may gain privileges"
            if own.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{name}: keeps capabilities"


def references(manifests: list[Manifest]) -> Iterator[str]:
    """Accounts, config maps, secrets, claims and volumes that are named are there."""
    maps = {m["metadata"]["name"]: set(m.get("data", {})) for m in of_kind(manifests, "ConfigMap")}
    claims = {
        m["metadata"]["name"] for m in of_kind(manifests, "PersistentVolumeClaim")
    } | CLAIMS_BEFORE
    accounts = {m["metadata"]["name"] for m in of_kind(manifests, "ServiceAccount")}
    for work in workloads(manifests):
        if work.pod.get("serviceAccountName") not in accounts:
            yield f"{work.name}: there is no service account {work.pod.get('serviceAccountName')}"
        volumes = {volume["name"] for volume in work.pod.get("volumes", [])}
        volumes |= {
            c["metadata"]["name"] for c in work.owner["spec"].get("volumeClaimTemplates", [])
        }
        for volume in work.pod.get("volumes", []):
            wanted = [
                (volume.get("configMap", {}).get("name"), set(maps)),
                (volume.get("secret", {}).get("secretName"), set(SECRETS)),
                (volume.get("persistentVolumeClaim", {}).get("claimName"), claims),
            ]
            for name, known in wanted:
                if name is not None and name not in known:
                    yield f"{work.name}: the volume {volume['name']} is of {name}, which is not there"
        for container in work.containers:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{work.name}: mounts {mount['name']}, which is no volume of it"
            for variable in container.get("env", []):
                yield from _source(work.name, variable, maps)


def _source(work: str, variable: Manifest, maps: dict[str, set[str]]) -> Iterator[str]:
    given = variable.get("valueFrom", {})
    for key, known in (("configMapKeyRef", maps), ("secretKeyRef", SECRETS)):
        asked = given.get(key)
        if asked is not None and asked["key"] not in known.get(asked["name"], set()):
            yield f"{work}: {variable['name']} is {asked['key']} of {asked['name']}, which is not there"


def scaling(manifests: list[Manifest]) -> Iterator[str]:
    """A ScaledObject has a target that leaves the number of replicas to it, and never takes the last one away."""
    targets = {m["metadata"]["name"]: m for m in of_kind(manifests, "Deployment")}
    for scaled in of_kind(manifests, "ScaledObject"):
        spec, name = scaled["spec"], scaled["metadata"]["name"]
        target = targets.get(spec["scaleTargetRef"]["name"])
        if target is None:
            yield f"ScaledObject/{name}: there is no Deployment {spec['scaleTargetRef']['name']}"
        elif "replicas" in target["spec"]:
            yield f"ScaledObject/{name}: the Deployment sets replicas too, which each apply would set back"
        if spec.get("minReplicaCount", 0) < 1:
            yield f"ScaledObject/{name}: the last one may go while something is pending"
        if spec.get("minReplicaCount", 0) > spec.get("maxReplicaCount", 100):
            yield f"ScaledObject/{name}: min is above max"


CHECKS: tuple[Callable[[list[Manifest]], Iterator[str]], ...] = (
    selectors, policies, ports, resources, disruptions, rights, references, scaling,
)  # fmt: skip
