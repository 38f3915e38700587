"""A learner that is started once more after the end of its run: a container engine or a cluster may well do that."""

import faulthandler
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.checkpoints import Checkpoints, Meta
from offbeat.config import Recipe, load_recipe
from offbeat.errors import OffbeatError
from offbeat.ledger import Ledger
from offbeat.resume import fixed_settings
from services.learner.app import run_rank
from services.learner.data.dataset import load_dataset
from tests.harness.whole_run import write_recipe

NOWHERE = ["redis.url=redis://127.0.0.1:9/0", "checkpoint.address=127.0.0.1:9"]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A run of two steps whose last checkpoint is there. Nothing listens where its services should be."""
    return load_recipe(
        write_recipe(tmp_path),
        ["run.id=mine", "schedule.steps=2", "redis.outage_seconds=1", *NOWHERE],
    )


@pytest.fixture(autouse=True)
def go_on() -> Iterator[None]:
    """A learner that has ended makes sure that its process ends, too, which is this one here."""
    yield
    faulthandler.cancel_dump_traceback_later()


def start(recipe: Recipe) -> int:
    return run_rank(recipe, rank=0, world=1, dataset=load_dataset(recipe))


def at_the_end(recipe: Recipe, *events: str) -> Path:
    folder = Path(recipe.run.directory) / "mine"
    checkpoints = Checkpoints(folder, keep=2)
    meta = Meta(2, 2, 1, {1: (0, 0)}, [(1, 0)], settings=fixed_settings(recipe))
    checkpoints.commit(checkpoints.begin(1, 2), meta)
    ledger = Ledger(folder, 1)
    for event in events:
        ledger.write(event, step=2)
    ledger.close()
    return folder


def test_a_finished_run_stays_finished(recipe: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    folder = at_the_end(recipe, "start", "step", "finish")
    before = sorted(path for path in folder.rglob("*"))
    with caplog.at_level(logging.INFO):
        assert start(recipe) == 0
    assert "run mine is finished already, after 2 steps" in caplog.text
    assert sorted(path for path in folder.rglob("*")) == before


@pytest.mark.parametrize(
    "events", [("start", "step"), ()], ids=["died before its end", "no ledger"]
)
def test_a_run_that_died_at_its_end_is_not_finished(
    recipe: Recipe, events: tuple[str, ...]
) -> None:
    at_the_end(recipe, *events)
    with pytest.raises(OffbeatError, match="training state"):  # it goes on to load the checkpoint
        start(recipe)


def test_a_finished_run_with_more_steps_goes_on(recipe: Recipe) -> None:
    at_the_end(recipe, "start", "step", "finish")
    longer = recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"steps": 4})})
    with pytest.raises(OffbeatError, match="training state"):
        start(longer)
