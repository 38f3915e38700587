"""The custom resources in deploy/kubernetes, typed: KEDA's ScaledObject (2.17) and JobSet (v1alpha2).

Only what is used here: an unknown field is an error, as it would be for the API server's strict validation.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


# --- KEDA


class ScaleTarget(Strict):
    name: str
    kind: str = "Deployment"
    apiVersion: str = "apps/v1"


class Fallback(Strict):
    failureThreshold: int = Field(ge=0)
    replicas: int = Field(ge=0)
    behavior: Literal[
        "static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"
    ] = "static"


class ScalingPolicy(Strict):
    type: Literal["Pods", "Percent"]
    value: int = Field(gt=0)
    periodSeconds: int = Field(gt=0, le=1800)


class ScalingRules(Strict):
    stabilizationWindowSeconds: int = Field(0, ge=0, le=3600)
    policies: list[ScalingPolicy] = Field(min_length=1)
    selectPolicy: Literal["Max", "Min", "Disabled"] = "Max"


class Behavior(Strict):
    scaleUp: ScalingRules
    scaleDown: ScalingRules


class HorizontalPodAutoscalerConfig(Strict):
    behavior: Behavior


class Advanced(Strict):
    restoreToOriginalReplicaCount: bool = False
    horizontalPodAutoscalerConfig: HorizontalPodAutoscalerConfig


class PrometheusMetadata(Strict):
    """KEDA wants strings, numbers included."""

    serverAddress: str = Field(pattern=r"^https?://[a-z0-9.-]+(:\d+)?$")
    query: str = Field(min_length=1)
    threshold: str = Field(pattern=r"^\d+(\.\d+)?$")
    activationThreshold: str = Field("0", pattern=r"^\d+(\.\d+)?$")
    ignoreNullValues: Literal["true", "false"] = "true"


class PrometheusTrigger(Strict):
    type: Literal["prometheus"]
    name: str
    metricType: Literal["AverageValue", "Value"] = "AverageValue"
    metadata: PrometheusMetadata


class ScaledObjectSpec(Strict):
    scaleTargetRef: ScaleTarget
    pollingInterval: int = Field(30, gt=0)
    cooldownPeriod: int = Field(300, ge=0)
    minReplicaCount: int = Field(0, ge=0)
    maxReplicaCount: int = Field(100, ge=1)
    fallback: Fallback | None = None
    advanced: Advanced
    triggers: list[PrometheusTrigger] = Field(min_length=1)

    @model_validator(mode="after")
    def _bounds(self) -> "ScaledObjectSpec":
        if self.minReplicaCount > self.maxReplicaCount:
            raise ValueError("minReplicaCount is above maxReplicaCount")
        return self


class ScaledObject(Strict):
    apiVersion: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: ScaledObjectSpec


# --- JobSet; what is in a job's template is a built-in kind's, and is validated as such


class Network(Strict):
    enableDNSHostnames: bool = True
    subdomain: str | None = None
    publishNotReadyAddresses: bool = True


class SuccessPolicy(Strict):
    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[str] = []


class FailureRule(Strict):
    name: str = Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:-]*[A-Za-z0-9_])?$")
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    targetReplicatedJobs: list[str] = []
    onJobFailureReasons: list[
        Literal[
            "BackoffLimitExceeded",
            "DeadlineExceeded",
            "FailedIndexes",
            "MaxFailedIndexesExceeded",
            "PodFailurePolicy",
        ]
    ] = []


class FailurePolicy(Strict):
    maxRestarts: int = Field(ge=0)
    restartStrategy: Literal["Recreate", "BlockingRecreate"] = "Recreate"
    rules: list[FailureRule] = []


class JobTemplate(Strict):
    metadata: dict[str, Any] = {}
    spec: dict[str, Any]


class ReplicatedJob(Strict):
    name: str
    replicas: int = Field(1, ge=0)
    template: JobTemplate


class JobSetSpec(Strict):
    network: Network
    successPolicy: SuccessPolicy
    failurePolicy: FailurePolicy
    replicatedJobs: list[ReplicatedJob] = Field(min_length=1)
    suspend: bool = False
    ttlSecondsAfterFinished: int | None = None

    @model_validator(mode="after")
    def _targets(self) -> "JobSetSpec":
        names = {job.name for job in self.replicatedJobs}
        asked = set(self.successPolicy.targetReplicatedJobs)
        if not asked <= names:
            raise ValueError(f"successPolicy names {sorted(asked - names)}, which are no jobs here")
        return self


class JobSet(Strict):
    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Metadata
    spec: JobSetSpec


KINDS: dict[str, type[Strict]] = {"ScaledObject": ScaledObject, "JobSet": JobSet}
