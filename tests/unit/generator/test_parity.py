"""The parity check: rounding passes, another version does not, in bfloat16 as well."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from offbeat.config import load_recipe
from services.generator.updates import Difference
from tests.harness.tiny_models import make_tiny_model, perturb, reference_logprobs

RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic_tiny.yaml"
SEQUENCES = [[1, *range(3, 60)], [1, *range(100, 40, -1)], [7, 8, 9]]


def test_a_difference_is_the_largest_and_the_mean() -> None:
    found = Difference.of([[1.0, 2.0], []], [[1.0, 2.5], []])
    assert (found.largest, found.mean) == (0.5, 0.25)
    assert found.within(2.5)
    assert not found.within(2.4), "the mean is more than a tenth"
    assert not found.within(0.4)
    assert Difference.of([[math.nan, 0.0]], [[0.0, 0.0]]).mean == math.inf
    assert Difference.of([], []).within(1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_passes_and_a_skipped_update_is_seen(tmp_path: Path, dtype: str) -> None:
    """Two ways of computing one model: the dtype's own, and float32 from the same weights."""
    model = make_tiny_model(tmp_path / "model", tied=True).to(getattr(torch, dtype))
    tolerance = load_recipe(RECIPE, [f"model.dtype={dtype}"]).parity_tolerance
    held = reference_logprobs(model, SEQUENCES)
    exact = reference_logprobs(model.float(), SEQUENCES)
    assert Difference.of(held, exact).within(tolerance)
    perturb(model, seed=1)
    published = reference_logprobs(model.to(getattr(torch, dtype)), SEQUENCES)
    assert not Difference.of(held, published).within(tolerance)


def test_the_tolerance_is_the_recipes_where_it_has_one() -> None:
    recipe = load_recipe(RECIPE, ["generator.parity_tolerance=0.25"])
    assert recipe.parity_tolerance == 0.25
    assert load_recipe(RECIPE).parity_tolerance == 1e-3
