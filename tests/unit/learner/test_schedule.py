"""The learning rate over a run."""

import pytest

from offbeat.config.learner import OptimizerSettings
from services.learner.schedule import learning_rate


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 3, 10])
def test_every_update_moves_the_weights(schedule: str, warmup: int) -> None:
    settings = OptimizerSettings.model_validate(
        {"lr": 2.0, "schedule": schedule, "warmup_updates": warmup}
    )
    rates = [learning_rate(update, 10, settings) for update in range(10)]
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_linear_decay_starts_at_the_peak_and_reaches_zero_after_the_last_update() -> None:
    settings = OptimizerSettings(lr=1.0)
    assert [learning_rate(update, 4, settings) for update in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    assert learning_rate(9, 4, settings) == 0


def test_the_schedule_of_the_papers_code_ends_at_zero_and_averages_less() -> None:
    """Four steps of two updates: it moves on before each step; the mean of B steps is (B - 1) / 2B."""
    settings = OptimizerSettings(lr=1.0, schedule_per="step")
    rates = [learning_rate(update, 8, settings, 2) for update in range(8)]
    assert rates == [0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0.0, 0.0]
    for steps in (4, 16):
        mean = sum(learning_rate(step, steps, settings) for step in range(steps)) / steps
        assert mean == pytest.approx((steps - 1) / (2 * steps))
    constant = OptimizerSettings(lr=1.0, schedule="constant", schedule_per="step")
    assert learning_rate(7, 8, constant, 2) == 1.0
