"""``python -m services.learner.data --recipe FILE``: what the learner would make of a recipe's data, as JSON.

Used by ``offbeat doctor RECIPE``. Writes one object to stdout: `parts` (counts of each source, see `Counts`), `limit`
(tokens that a prompt may have) and `first` (the first prompt that would be issued), or `error`. Exit codes: 0 the data
can be used; 2 it can't.
"""

import argparse
import json
import sys
from typing import Any

from offbeat.config import Recipe, load_recipe
from offbeat.errors import OffbeatError


def main() -> int:
    """Loads everything as the learner does, but no model."""
    parser = argparse.ArgumentParser(description="Checks the data of a recipe.")
    parser.add_argument("--recipe", required=True, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    try:
        found = _look(load_recipe(arguments.recipe, arguments.overrides))
    except OffbeatError as error:
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 2 if "error" in found else 0


def _look(recipe: Recipe) -> dict[str, Any]:
    from services.learner.data.dataset import load_dataset, prompt_limit

    dataset = load_dataset(recipe)
    first = dataset.train.at(0)
    return {
        "parts": dataset.as_dict(),
        "limit": prompt_limit(recipe),
        "first": {
            "text": first.text,
            "tokens": len(first.token_ids),
            "columns": sorted(first.columns),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
