"""Alarms: each rule says what it suspects; thresholds are the recipe's."""

import logging

import pytest

from offbeat.cli.display import alarms
from offbeat.config.health import AlarmSettings
from services.learner.health import REPEAT_STEPS, RULES, Health

GOOD = {
    "mismatch_kl": 0.0,
    "drift_kl": 0.0,
    "kl": 0.0,
    "ess": 1.0,
    "clip_fraction": 0.0,
    "entropy": 1.0,
    "eos_rate": 1.0,
    "informative_fraction": 1.0,
    "grad_norm": 1.0,
    "dead_fraction": 0.0,
}
BAD = {name: 0.0 if value == 1.0 else 1e6 for name, value in GOOD.items()} | {"grad_norm": 1e6}


def test_every_threshold_has_a_rule_and_every_rule_a_threshold() -> None:
    assert [rule.name for rule in RULES] == list(AlarmSettings.model_fields)
    assert set(GOOD) == set(AlarmSettings.model_fields)


def test_a_healthy_step_raises_nothing() -> None:
    found = Health(AlarmSettings()).check(1, GOOD)
    assert found == {f"alarm/{name}": 0.0 for name in GOOD} | {"alarms": 0.0}
    assert alarms(found) == []


@pytest.mark.parametrize("name", sorted(GOOD))
def test_each_alarm_names_suspicion_and_advice(name: str, caplog: pytest.LogCaptureFixture) -> None:
    health = Health(AlarmSettings())
    with caplog.at_level(logging.WARNING):
        found = health.check(3, GOOD | {name: BAD[name]})
    assert alarms(found) == [name]
    assert found["alarms"] == 1
    [line] = [record.getMessage() for record in caplog.records]
    rule = next(rule for rule in RULES if rule.name == name)
    assert f"learner.alarms.{name}" in line
    assert rule.suspects in line
    assert rule.advice in line


def test_an_alarm_that_goes_on_is_counted_each_step_and_told_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health(AlarmSettings())
    with caplog.at_level(logging.WARNING):
        for step in range(REPEAT_STEPS + 1):
            health.check(step, {"ess": 0.1})
    assert len(caplog.records) == 2
    assert health.count == REPEAT_STEPS + 1
    health.check(100, {"ess": 1.0})
    health.check(101, {"ess": 0.1})
    assert len(caplog.records) == 3


def test_an_alarm_can_be_switched_off_and_an_absent_metric_is_no_alarm() -> None:
    found = Health(AlarmSettings(ess=None)).check(0, {"ess": 0.0})
    assert found == {"alarms": 0.0}
