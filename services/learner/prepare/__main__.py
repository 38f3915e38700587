"""``python -m services.learner.prepare --recipe FILE``: makes the folder `model.path` as the recipe's `prepare` says.

Exit codes: 0 made, or already there; 1 failed; 2 a mistake in the recipe.
"""

import argparse
import logging
import sys
from pathlib import Path

from pydantic import ValidationError

from offbeat.config import Recipe, load_recipe
from offbeat.errors import ConfigError, DataError, OffbeatError
from offbeat.telemetry import setup_logs

log = logging.getLogger("services.learner.prepare")


def main() -> int:
    """Parses the recipe before anything heavy is imported."""
    parser = argparse.ArgumentParser(description="Makes the policy that a recipe starts from.")
    parser.add_argument("--recipe", required=True, metavar="FILE")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="another folder than the recipe's model.path")
    arguments = parser.parse_args()
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        setup_logs(recipe.telemetry, "prepare")
        _prepare(recipe, arguments.out or Path(recipe.model.path))
    except (ConfigError, DataError) as error:
        log.error("%s", error)
        return 2
    except OffbeatError as error:
        log.error("%s", error)
        return 1
    return 0


def _prepare(recipe: Recipe, out: Path) -> None:
    if (out / "config.json").is_file():
        log.info("%s is already there", out)
        return
    if recipe.prepare is None:
        raise ConfigError(
            f"the recipe has no `prepare` section, and {out} has no model; add the section, or correct model.path"
        )
    try:
        _PREPARE[recipe.prepare.kind](recipe, recipe.prepare.params, out)
    except ValidationError as error:
        raise ConfigError(f"prepare.params: {error}") from None


def _prepare_sft(recipe: Recipe, params: dict[str, object], out: Path) -> None:
    from services.learner.prepare.rows import examples
    from services.learner.prepare.sft import SftSettings, prepare_sft

    settings = SftSettings.model_validate(params)
    train, heldout = examples(recipe.data)
    prepare_sft(settings, train=train, heldout=heldout, out=out)


def _prepare_gguf(recipe: Recipe, params: dict[str, object], out: Path) -> None:
    from services.learner.prepare.gguf import GgufSettings, prepare_gguf

    prepare_gguf(GgufSettings.model_validate(params), out=out)


def _prepare_hub(recipe: Recipe, params: dict[str, object], out: Path) -> None:
    from services.learner.prepare.hub import HubSettings, prepare_hub

    prepare_hub(HubSettings.model_validate(params), out=out)


def _prepare_tldr(recipe: Recipe, params: dict[str, object], out: Path) -> None:
    from services.learner.prepare.tldr import TldrSettings, prepare_tldr

    # The policy's folder is one of several that belong together.
    prepare_tldr(TldrSettings.model_validate(params), recipe, out.parent)


_PREPARE = {
    "sft": _prepare_sft,
    "gguf": _prepare_gguf,
    "hub": _prepare_hub,
    "tldr": _prepare_tldr,
}


if __name__ == "__main__":
    sys.exit(main())
