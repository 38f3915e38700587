"""`offbeat prepare`: makes the model folder that a recipe starts from."""

from offbeat.cli.options import Overrides, RecipeFile


def prepare(recipe: RecipeFile, overrides: Overrides = []) -> None:  # noqa: B006 - typer copies it
    """Make the recipe's start model, unless it is there already.

    `offbeat run` does the same by itself when the model folder is missing.
    """
    import tempfile
    from pathlib import Path

    from offbeat.config import load_recipe
    from offbeat.config.load import dump_recipe
    from offbeat.local.model import check_model, prepare_model
    from offbeat.local.signals import run_until_signalled

    settings = load_recipe(recipe, overrides)
    if not check_model(settings):
        print(f"{settings.model.path} is there already; to make it anew, remove it first")
        return
    with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
        resolved = Path(folder) / "recipe.yaml"
        resolved.write_text(dump_recipe(settings), encoding="utf-8")
        run_until_signalled(prepare_model(settings, resolved), lambda _: None)
    print(f"the model is in {settings.model.path}")
