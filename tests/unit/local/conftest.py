"""Recipes for the tests of the local runner."""

from pathlib import Path

import pytest

from offbeat.config import Recipe, load_recipe

RECIPE = Path(__file__).parents[2] / "data" / "one_of_each.yaml"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """One process of each service; its runs are kept in `tmp_path`."""
    return load_recipe(RECIPE, [f"run.directory={tmp_path}/runs"])
