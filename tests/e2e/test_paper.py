"""The paper's TL;DR recipe as a whole run: its settings as they are, but small models, few prompts and no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.config import load_recipe
from offbeat.config.load import dump_recipe
from tests.harness import paper_fixtures as fixtures
from tests.harness.whole_run import start

RECIPE = Path(__file__).parents[2] / "recipes" / "paper" / "tldr_pythia_410m.yaml"
SMALLER = [
    "model.dtype=float32",
    "schedule.steps=3",
    "schedule.prompts_per_step=2",
    "sampling.max_tokens=6",
    "evaluation.max_tokens=9",
    "learner.ranks=1",
    "learner.zero_stage=0",
    "learner.devices=null",
    "generator.devices=null",
    "generator.engine={name: transformers}",
    "reward.devices=null",
    "data.train.name=null",
    "data.heldout.name=null",
]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("max_lag", [0, 1], ids=["sync", "async"])
def test_the_recipe_trains_and_evaluates(tmp_path: Path, max_lag: int) -> None:
    data = fixtures.tldr_repository(tmp_path / "data")
    policy, proxy, gold = (tmp_path / name for name in ("policy", "proxy", "gold"))
    fixtures.pythia(policy, seed=1)
    fixtures.pythia(proxy, seed=2, reward=True)
    fixtures.pythia(gold, seed=3, reward=True)
    sets = [f"run.directory={tmp_path / 'runs'}", f"schedule.max_lag={max_lag}"]
    sets += [f"model.path={policy}", f"data.train.path={data}", f"data.heldout.path={data}"]
    models = {0: proxy, 2: gold, 3: policy}
    sets += [f"reward.functions.{index}.params.path={path}" for index, path in models.items()]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(load_recipe(RECIPE, [*SMALLER, *sets])))
    with start(recipe, environment={"HF_HOME": str(tmp_path / "hub")}) as run:
        run.succeed()
        lines = run.metrics()
        audit = run.audit()
    assert (audit.trained, audit.filtered, audit.dead) == (6, 0, 0)
    steps = [line for line in lines if "loss" in line]
    assert [line["lag/max"] for line in steps] == [0, *[max_lag] * 2]
    last = [line for line in lines if "eval/greedy/reward" in line][-1]
    assert 0 <= last["eval/greedy/component/reward_model_win"] <= 1
    assert last["eval/greedy/component/perplexity"] > 1
