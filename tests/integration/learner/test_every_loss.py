"""Every loss trains: through the recipe's command line, and in a trainer on a tiny policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbeat.config.load import load_recipe
from services.learner.trainer import Trainer
from tests.harness.losses import FAMILIES, is_policy_gradient
from tests.harness.training import make_recipe, recorded_groups

RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic_tiny.yaml"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_default_recipe_takes_every_loss(name: str) -> None:
    recipe = load_recipe(RECIPE, [f"learner.loss={{name: {name}}}"])
    assert recipe.learner.loss.name == name


def run(policy: Path, loss: dict[str, Any], **learner: Any) -> list[dict[str, float]]:
    trainer = Trainer(make_recipe(policy, loss=loss, **learner))
    try:
        return [trainer.train_step(recorded_groups(step)) for step in range(2)]
    finally:
        trainer.close()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_loss_trains(policy: Path, name: str) -> None:
    """Two steps of one update, whose pi_old is the policy itself."""
    for metrics in run(policy, {"name": name}):
        assert metrics["grad_norm"] > 0
        assert {"loss", "ess", "entropy", "drift_kl"} <= set(metrics)
        if is_policy_gradient(name):
            assert metrics["advantage/std"] > 0


def test_statistics_over_the_step_do_not_depend_on_micro_batches(policy: Path) -> None:
    """Whitening with the KL in the reward needs pi_old of the whole step, M2PO the whole update."""
    whitened = {"name": "grpo", "whiten_advantages": True, "kl_coef": 0.2, "kl_in": "reward"}
    for loss in (whitened, {"name": "m2po", "m2_threshold": 0.5}):
        norms = [
            [found["grad_norm"] for found in run(policy, loss, batching=cut)]
            for cut in ({"mini_batches": 2}, {"mini_batches": 2, "micro_batch_tokens": 60})
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_corrections_change_the_gradient_and_are_reported(policy: Path) -> None:
    plain = run(policy, {"name": "grpo"})
    capped = run(policy, {"name": "grpo"}, corrections=[{"name": "tis", "cap": 0.5}])
    assert plain[0]["grad_norm"] != pytest.approx(capped[0]["grad_norm"], rel=1e-3)
    assert 0 < capped[0]["correction/mean"] <= 0.5
    assert capped[0]["correction/zero_fraction"] == 0.0
