"""What `offbeat run --dry-run` prints."""

import shlex
from pathlib import Path

import yaml

from offbeat.config import Recipe
from offbeat.local import commands
from offbeat.local.model import check_model
from offbeat.local.threads import cores_available

REDIS_CHOSEN_LATER = "redis://127.0.0.1:PORT/0"
CHECKPOINT_CHOSEN_LATER = "127.0.0.1:PORT"


def print_dry_run(recipe: Recipe) -> None:
    """Prints each process: its command line, environment, and part of the recipe, as YAML."""
    recipe_file = Path(recipe.run.directory) / recipe.run_id / "recipe.yaml"
    cores = cores_available()
    specs = commands.worker_specs(
        recipe,
        recipe_file,
        redis_url=recipe.redis.url or REDIS_CHOSEN_LATER,
        checkpoint_address=recipe.checkpoint.address or CHECKPOINT_CHOSEN_LATER,
        cores=cores,
    )
    if recipe.checkpoint.address is None:
        redis_url = recipe.redis.url or REDIS_CHOSEN_LATER
        specs.insert(
            0, commands.checkpoint_spec(recipe, recipe_file, redis_url=redis_url, cores=cores)
        )
    print(f"# Nothing is started. The recipe would be written to {recipe_file}.")
    print("# PORT stands for ports that are chosen at the start.")
    if check_model(recipe):
        print(f"# {recipe.model.path} does not exist yet: it would be prepared first.")
    if recipe.redis.url is None:
        limit = recipe.redis.embedded_max_memory_mb
        print(f"# An embedded Redis server with {limit} MiB would be started.")
    tree = {
        spec.name: {
            "command": shlex.join(spec.command),
            "environment": dict(spec.env),
            "recipe": commands.recipe_part(recipe, spec.service),
        }
        for spec in specs
    }
    print(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=10_000), end="")
