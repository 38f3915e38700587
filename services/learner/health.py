"""Alarms about learning: rules over a step's metrics. Pure; the loop asks after each step.

An alarm says what it suspects and what to try. Thresholds are `learner.alarms` in the recipe.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.config.health import AlarmSettings

log = logging.getLogger(__name__)

REPEAT_STEPS = 25
"""An alarm that goes on is logged again after so many steps."""


@dataclass(frozen=True)
class Rule:
    """An alarm about the metric of its name. `above`: which side of the threshold is bad."""

    name: str
    above: bool
    suspects: str
    advice: str

    def raised(self, metrics: Mapping[str, float], threshold: float | None) -> bool | None:
        """Whether it is; None when the step has no such metric, or the alarm is off."""
        value = metrics.get(self.name)
        if value is None or threshold is None:
            return None
        return value > threshold if self.above else value < threshold


RULES = (
    Rule(
        "mismatch_kl",
        True,
        "engine and learner disagree about the same weights",
        "look at model.dtype, the generator's parity differences, and its engine settings; a correction "
        "(learner.corrections) makes up for a small difference",
    ),
    Rule(
        "drift_kl",
        True,
        "the policy has moved far from the one that sampled",
        "lower learner.optimizer.lr or schedule.max_lag, or choose a loss or correction that tolerates it",
    ),
    Rule(
        "kl",
        True,
        "the policy has left the reference, perhaps to please the reward without being better",
        "read some completions; raise beta or kl_coef, or lower learner.optimizer.lr",
    ),
    Rule(
        "ess",
        False,
        "a few completions carry most of the importance weight",
        "lower schedule.max_lag or the updates per step, or add learner.corrections: [{name: tis}]",
    ),
    Rule(
        "clip_fraction",
        True,
        "the updates of one step move the policy past the clipping range",
        "lower learner.optimizer.lr, learner.batching.passes or mini_batches",
    ),
    Rule(
        "entropy",
        False,
        "the policy has collapsed to one answer per prompt",
        "lower learner.optimizer.lr, raise sampling.temperature, or add a KL to the reference",
    ),
    Rule(
        "eos_rate",
        False,
        "most completions are cut off",
        "raise sampling.max_tokens, check that the policy ends its answers, or add the reward missing_eos",
    ),
    Rule(
        "informative_fraction",
        False,
        "nearly all groups have equal rewards: the task is too easy or too hard, or the reward is broken",
        "look at reward/mean; change the data, raise sampling.k, or set schedule.oversample",
    ),
    Rule(
        "grad_norm",
        True,
        "an extreme reward or ratio",
        "look at reward_component/* and logprob_diff/max; clip rewards (reward_clip), lower the rate",
    ),
    Rule(
        "dead_fraction",
        True,
        "generators or reward workers give groups up",
        "look for their reasons in the learner's log; raise schedule.group_deadline_seconds or repair the reward",
    ),
)


class Health:
    """Checks each step and remembers how long an alarm has been on."""

    def __init__(self, settings: AlarmSettings) -> None:
        self._thresholds = settings.model_dump()
        self._since: dict[str, int] = {}
        self.count = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """alarm/<name>, 1 or 0, for each rule that the step can answer, and alarms, their count so far."""
        found: dict[str, float] = {}
        for rule in RULES:
            raised = rule.raised(metrics, self._thresholds[rule.name])
            if raised is None:
                continue
            found[f"alarm/{rule.name}"] = float(raised)
            if raised:
                self.count += 1
                self._tell(rule, step, metrics[rule.name])
            else:
                self._since.pop(rule.name, None)
        return found | {"alarms": float(self.count)}

    def _tell(self, rule: Rule, step: int, value: float) -> None:
        since = self._since.setdefault(rule.name, step)
        if (step - since) % REPEAT_STEPS == 0:
            log.warning(
                "%s is %.3g, %s learner.alarms.%s = %g: %s; %s",
                rule.name, value, "above" if rule.above else "below", rule.name,
                self._thresholds[rule.name], rule.suspects, rule.advice,
            )  # fmt: skip
