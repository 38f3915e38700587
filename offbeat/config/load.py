"""Reads a recipe file, applies ``--set a.b=value``, and turns every mistake into one clear error."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from offbeat.config.mistakes import describe
from offbeat.config.recipe import Recipe
from offbeat.errors import ConfigError

MODEL_FUNCTIONS = ("reward_model", "reward_model_win", "perplexity")
"""Built-in reward functions whose `path` is a model folder."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads the YAML file at `path` and applies overrides of the form ``a.b.c=value`` (value is YAML).

    Relative paths in the recipe are resolved against the recipe's folder. Raises `ConfigError` naming the key, what
    was found, and what is allowed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"recipe {path}: can't be read ({error.strerror}); give the path of a YAML file"
        ) from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"recipe {path}: expected a mapping at the top, found {type(tree).__name__}"
        )
    for override in overrides:
        _apply(tree, override)
    _resolve_paths(tree, path.resolve().parent)
    return parse_recipe(tree, source=str(path))


def parse_recipe(tree: dict[str, Any], *, source: str) -> Recipe:
    """Validates a recipe tree. Raises `ConfigError`."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        lines = [describe(Recipe, item) for item in error.errors()]
        raise ConfigError(f"{source}: " + "\n  ".join(lines)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load_recipe` of it gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"--set {override!r}: expected KEY=VALUE, such as learner.optimizer.lr=1e-5"
        )
    *parents, last = key.split(".")
    node: Any = tree
    for part in parents:
        node = _child(node, part, override)
    value = yaml.safe_load(raw) if raw else None
    if isinstance(value, str):
        value = _number(value)
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    else:
        node[last] = value


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    child = node.get(part)
    if child is None:
        child = node[part] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(f"--set {override!r}: {part} is the value {child!r}, not a section")
    return child


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(
            f"--set {override!r}: expected an index below {len(node)}, found {part!r}"
        )
    return int(part)


def _number(value: str) -> str | float:
    # YAML 1.1 reads 1e-5 as text; nobody who types it means text.
    try:
        return float(value) if value[:1] in "+-.0123456789" else value
    except ValueError:
        return value


def _resolve_paths(tree: dict[str, Any], folder: Path) -> None:
    """Makes paths of the recipe absolute, so that every process finds them whatever its folder is."""
    learner = tree.get("learner")
    loss = learner.get("loss") if isinstance(learner, dict) else None
    files = [
        (tree.get("model"), "path"),
        (learner, "reference"),
        (loss, "critic_model"),
        (_lora(learner), "adapter"),
        (_gguf_file(tree.get("prepare")), "file"),
        (_params(tree.get("prepare")), "init"),
        *((model, "path") for model in _hub_models(tree.get("prepare"))),
        *((source, "path") for source in _sources(tree.get("data")) if not _is_code(source)),
        *((params, "path") for params in _params_of(tree.get("reward"), *MODEL_FUNCTIONS)),
        *((params, "api_key_file") for params in _params_of(tree.get("reward"), "judge")),
    ]
    code = [
        *((source, "path") for source in _sources(tree.get("data")) if _is_code(source)),
        *((function, "path") for function in _functions(tree.get("reward"))),
        *((_params(tree.get("prepare")), key) for key in ("gold", "demonstrator")),
        (_proxy(tree.get("prepare")), "init"),
        (loss, "path"),
    ]
    # A file or folder that isn't there yet (a model still to be prepared) has its place all the same.
    for node, key in files:
        if isinstance(node, dict) and isinstance(node.get(key), str):
            node[key] = str((folder / node[key]).resolve())
    for node, key in code:
        if isinstance(node, dict) and isinstance(node.get(key), str):
            value, _, attribute = node[key].rpartition(":")
            if value.endswith(".py"):
                node[key] = f"{(folder / value).resolve()}:{attribute}"


def _proxy(prepare: Any) -> Any:
    params = _params(prepare)
    return params.get("proxy") if isinstance(params, dict) else None


def _lora(learner: Any) -> Any:
    return learner.get("lora") if isinstance(learner, dict) else None


def _gguf_file(prepare: Any) -> Any:
    """The params of a preparation whose `file` is a path, not a name in a package."""
    params = prepare.get("params") if isinstance(prepare, dict) else None
    if not isinstance(params, dict) or prepare.get("kind") != "gguf" or params.get("package"):
        return None
    return params


def _hub_models(prepare: Any) -> list[Any]:
    """The models that a preparation downloads beside the policy."""
    params = (
        _params(prepare) if isinstance(prepare, dict) and prepare.get("kind") == "hub" else None
    )
    others = params.get("others") if isinstance(params, dict) else None
    return others if isinstance(others, list) else []


def _sources(data: Any) -> list[Any]:
    """The sources of train and heldout, those in mixtures included."""
    found: list[Any] = []
    for source in (data.get("train"), data.get("heldout")) if isinstance(data, dict) else ():
        parts = source.get("parts") if isinstance(source, dict) else None
        inner = parts if isinstance(parts, list) else []
        found += [source, *(part.get("source") for part in inner if isinstance(part, dict))]
    return [source for source in found if isinstance(source, dict)]


def _is_code(source: dict[str, Any]) -> bool:
    return source.get("kind") == "python"


def _functions(reward: Any) -> list[Any]:
    functions = reward.get("functions") if isinstance(reward, dict) else None
    return functions if isinstance(functions, list) else []


def _params_of(reward: Any, *names: str) -> list[Any]:
    """The params of these built-in reward functions."""
    functions = [function for function in _functions(reward) if isinstance(function, dict)]
    return [
        _params(function)
        for function in functions
        if built_in(str(function.get("path") or function.get("name"))) in names
    ]


def built_in(named: str) -> str:
    """The name of a built-in reward function, from that name or from its import path (one that is used twice)."""
    return named.rpartition(".")[2].partition(":")[0]


def _params(section: Any) -> Any:
    return section.get("params") if isinstance(section, dict) else None
