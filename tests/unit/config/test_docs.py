"""Every piece of a recipe that the documentation shows is accepted as it stands."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from offbeat.config import Recipe
from offbeat.config.load import parse_recipe
from offbeat.config.reference import reference, settings_models
from services.reward.functions import load_functions

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REST = {
    "model": {"path": "model", "max_context": 1024},
    "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
    "sampling": {"k": 4, "max_tokens": 64},
    "schedule": {"steps": 10, "prompts_per_step": 8},
    "learner": {"loss": {"name": "online_dpo"}},
    "reward": {"functions": [{"name": "exact_match"}]},
}


def _is_a_recipe(block: str) -> bool:
    """Whether any section of a recipe is in it; other YAML (of containers, say) is no recipe."""
    tree = yaml.safe_load(block)
    return isinstance(tree, dict) and bool(set(tree) & set(Recipe.model_fields))


PIECES = [
    pytest.param(
        block.group(1), id=f"{page.name}:{page.read_text()[: block.start()].count(chr(10)) + 1}"
    )
    for page in PAGES
    for block in BLOCK.finditer(page.read_text())
    if _is_a_recipe(block.group(1))
]
JUDGES = [piece for piece in PIECES if "template:" in piece.values[0]]


def _whole(piece: str) -> Recipe:
    """The recipe of a piece: what it does not show is the smallest that is allowed."""
    sections = yaml.safe_load(piece).items()
    shown = {name: REST.get(name, {}) | section for name, section in sections}
    return parse_recipe(REST | shown, source="documentation")


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_of_a_recipe_is_valid(piece):
    _whole(piece)


def test_the_pages_show_pieces():
    assert len(PIECES) >= 12
    assert len(JUDGES) >= 3


@pytest.mark.parametrize("piece", JUDGES)
def test_judges_that_are_shown_can_be_made(piece, monkeypatch):
    """Params of reward functions are only looked at when a worker makes them."""
    monkeypatch.setenv("JUDGE_API_KEY", "x")
    recipe = _whole(piece)
    assert len(load_functions(recipe.reward.functions)) == len(recipe.reward.functions)


def test_the_recipe_reference_is_up_to_date():
    page = (ROOT / "docs" / "recipe.md").read_text()
    assert page == reference(), "run: python -m offbeat.config.reference > docs/recipe.md"


def test_every_key_of_the_recipe_is_explained():
    assert not list(_unexplained("", Recipe))


def _unexplained(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = settings_models(field.annotation)
        if not inner and not field.description and name not in ("name", "kind"):
            yield f"{prefix}{name}"
        for one in inner:
            yield from _unexplained(f"{prefix}{name}.", one)
