"""What `offbeat run --dry-run` prints."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml

from offbeat.config import Recipe
from offbeat.config.data import HuggingFaceSource, MixtureSource, PlainSource, ReasoningGymSource
from offbeat.config.load import MODEL_FUNCTIONS, built_in
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
    for line in _loads(recipe):
        print(f"# {line}")
    tree = {
        spec.name: {
            "command": shlex.join(spec.command),
            "environment": dict(spec.env),
            "recipe": commands.recipe_part(recipe, spec.service),
        }
        for spec in specs
    }
    print(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=10_000), end="")


def _loads(recipe: Recipe) -> Iterator[str]:
    """What the processes would load: data and models, a line each, and whether it is on this machine."""
    for name, source in (("train", recipe.data.train), ("heldout", recipe.data.heldout)):
        parts = source.parts if isinstance(source, MixtureSource) else ()
        plain = [part.source for part in parts] if parts else [source]
        for one in plain:
            if one is not None and not isinstance(one, MixtureSource):
                yield f"data.{name}: {_describe_source(one)}"
    hub = _hub_models(recipe)
    for key, path in _models(recipe):
        there = (Path(path) / "config.json").is_file()
        yield f"{key}: {path} ({'there' if there else hub.get(path, 'not there')})"


def _describe_source(source: PlainSource) -> str:
    match source:
        case HuggingFaceSource():
            place = source.path or f"{source.name} (Hugging Face hub)"
            named = (source.config, source.split, source.revision)
            return " ".join([place, *(word for word in named if word)])
        case ReasoningGymSource():
            return f"{source.size} tasks of reasoning_gym's {source.dataset}"
    return source.path


def _models(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Key and folder of each model that the recipe names."""
    yield "model.path", recipe.model.path
    critic = getattr(recipe.learner.loss, "critic_model", None)
    for key, path in (
        ("learner.reference", recipe.learner.reference),
        ("learner.loss.critic_model", critic),
    ):
        if path is not None:
            yield key, path
    for index, function in enumerate(recipe.reward.functions):
        if (
            built_in(function.path or function.name) in MODEL_FUNCTIONS
            and "path" in function.params
        ):
            yield f"reward.functions.{index} ({function.name})", str(function.params["path"])


def _hub_models(recipe: Recipe) -> dict[str, str]:
    """Where a preparation would fetch a folder from, by the folder."""
    if recipe.prepare is None or recipe.prepare.kind != "hub":
        return {}
    policy = {**recipe.prepare.params, "path": recipe.model.path}
    others = recipe.prepare.params.get("others")
    listed = [policy, *(others if isinstance(others, list) else [])]
    return {
        str(
            model.get("path")
        ): f"would be fetched: {model.get('repo')} at {model.get('revision', 'main')}"
        for model in listed
        if isinstance(model, dict)
    }
