"""The loop of KEDA and Kubernetes' HorizontalPodAutoscaler as Kubernetes describes it, driven by a ScaledObject.

Simulated time, in seconds. What is modelled: the polling interval, `AverageValue` triggers (the largest counts), the
tolerance of 10 %, both stabilisation windows, policies of pods and percent, bounds. What is not: failures of the
metrics' server, where `fallback` holds.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

TOLERANCE = 0.1
"""Kubernetes' default: a ratio this close to 1 changes nothing."""


class Autoscaler:
    """Decides the replicas of a ScaledObject's target from its triggers' values."""

    def __init__(self, scaled: Mapping[str, Any], *, replicas: int) -> None:
        spec = scaled["spec"]
        self.period = float(spec["pollingInterval"])
        self.replicas = replicas
        self._least, self._most = spec["minReplicaCount"], spec["maxReplicaCount"]
        self._thresholds = {
            trigger["name"]: float(trigger["metadata"]["threshold"]) for trigger in spec["triggers"]
        }
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        self._up, self._down = behavior["scaleUp"], behavior["scaleDown"]
        self._advised: deque[tuple[float, int]] = deque()
        self._history: deque[tuple[float, int]] = deque([(0.0, replicas)])

    def decide(self, now: float, values: Mapping[str, float]) -> int:
        """Sets and returns the replicas, given the triggers' values by name."""
        advice = max(self._advice(values[name], each) for name, each in self._thresholds.items())
        self._advised.append((now, advice))
        horizon = max(
            self._up["stabilizationWindowSeconds"], self._down["stabilizationWindowSeconds"]
        )
        while self._advised[0][0] < now - horizon:
            self._advised.popleft()
        wanted = self._stabilised(now)
        if wanted > self.replicas:
            wanted = min(wanted, self._allowed(now, self._up, grow=True))
        elif wanted < self.replicas:
            wanted = max(wanted, self._allowed(now, self._down, grow=False))
        self.replicas = min(max(wanted, self._least), self._most)
        self._history.append((now, self.replicas))
        return self.replicas

    def _advice(self, value: float, threshold: float) -> int:
        ratio = value / (threshold * self.replicas)
        if abs(ratio - 1) <= TOLERANCE:
            return self.replicas
        return math.ceil(value / threshold)

    def _stabilised(self, now: float) -> int:
        """No higher than all recent advice when it grows, no lower than all of it when it shrinks."""
        recent = [
            [
                advice
                for time, advice in self._advised
                if time >= now - rule["stabilizationWindowSeconds"]
            ]
            for rule in (self._up, self._down)
        ]
        low, high = min(recent[0]), max(recent[1])
        return min(max(self.replicas, low), high)

    def _allowed(self, now: float, rule: Mapping[str, Any], *, grow: bool) -> int:
        """How far the policies let it go: counted from what there was a period ago."""
        ends = []
        for policy in rule["policies"]:
            before = self._history[0][1]
            for time, count in self._history:
                if time <= now - policy["periodSeconds"]:
                    before = count
            part = policy["value"]
            if policy["type"] == "Percent":
                part = math.ceil(before * policy["value"] / 100)
            ends.append(before + part if grow else before - part)
        widest = rule.get("selectPolicy", "Max") == "Max"
        return max(ends) if grow == widest else min(ends)
