"""Every piece of a recipe that the documentation shows is accepted as it stands."""

import re
from pathlib import Path

import pytest
import yaml

from offbeat.config.load import parse_recipe

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
PIECES = [
    pytest.param(
        block.group(1), id=f"{page.name}:{page.read_text()[: block.start()].count(chr(10)) + 1}"
    )
    for page in PAGES
    for block in BLOCK.finditer(page.read_text())
]


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_of_a_recipe_is_valid(piece):
    """Sections that a piece does not show are the smallest that are allowed."""
    parse_recipe(REST | yaml.safe_load(piece), source="documentation")


def test_the_pages_show_pieces():
    assert len(PIECES) >= 12
