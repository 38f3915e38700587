"""Writes the recipe reference, docs/recipe.md, from the settings models: every key, its values, default and meaning.

``python -m offbeat.config.reference > docs/recipe.md``; a test says when that is due.
"""

import json
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from offbeat.config.recipe import Recipe

HEAD = """\
# The recipe, key by key

A run is one YAML file. Keys in bold are required, the others have a default. This is a whole recipe:

```yaml
model: {path: models/my-policy, dtype: float32, max_context: 256}
data:
  train: {kind: jsonl, path: train.jsonl}
  heldout: {kind: jsonl, path: heldout.jsonl}
  prompt: "{question}\\n"
sampling: {k: 4, max_tokens: 64}
schedule: {steps: 100, prompts_per_step: 16, max_lag: 1}
evaluation: {every_steps: 25}
learner:
  loss: {name: rloo}
  optimizer: {lr: 1.0e-5}
reward:
  functions:
    - {name: exact, path: "rewards.py:exact"}
```

- An unknown key is an error that names the nearest one. `offbeat doctor RECIPE` checks a recipe together with its
  model, data and reward functions; `offbeat run RECIPE --dry-run` prints every value that a run would have.
- `--set a.b=value` changes one key; the value is YAML: `--set schedule.max_lag=0`, `--set "learner.loss={name: grpo}"`.
- Paths are relative to the recipe's folder. `null` means what the table says about it.
- The default learning rate suits a language model of billions of parameters. Small models need more: the recipes
  in [`recipes/`](../recipes) take 2e-5 at 135 million parameters, and 4e-4 at half a million.

This page is written by `python -m offbeat.config.reference > docs/recipe.md`.
"""

ELSEWHERE = {
    "data.train": "[data.md](data.md) explains them.",
    "data.heldout": "As `data.train`.",
    "learner.loss": "Formulas and advice: [algorithms.md](algorithms.md).",
    "learner.corrections": "[algorithms.md](algorithms.md#corrections) has what they do.",
}


def reference() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD]
    for name, field in Recipe.model_fields.items():
        parts += _section(name, field)
    return "\n".join(parts)


def _section(key: str, field: FieldInfo) -> Iterator[str]:
    """A heading and a table; then the same for each section inside."""
    models = settings_models(field.annotation)
    yield f"{'#' * min(4, key.count('.') + 2)} {key}\n"
    if _is_list(field.annotation):
        yield "A list. Each entry is a section:\n"
    if len(models) > 1:
        yield from _variants(key, models)
        return
    model = models[0]
    doc = (model.__doc__ or "").strip().split("\n\n")[0]
    yield f"{doc}{_whole_default(field)}\n"
    yield _table(model)
    for name, inner in model.model_fields.items():
        if not settings_models(inner.annotation):
            continue
        if name != "rpc":
            yield from _section(f"{key}.{name}", inner)
        elif key == "learner":  # the same in every service
            yield from _section("SERVICE.rpc", inner)


def _variants(key: str, models: list[type[BaseModel]]) -> Iterator[str]:
    if key == "data.heldout":
        yield f"{ELSEWHERE[key]}\n"
        return
    tag = next(iter(models[0].model_fields))
    yield f"One of these, told apart by `{tag}`. {ELSEWHERE.get(key, '')}".rstrip() + "\n"
    yield f"| `{tag}` | further keys (default) |"
    yield "|---|---|"
    for model in models:
        name = typing.get_args(model.model_fields[tag].annotation)[0]
        keys = [_short(n, f) for n, f in model.model_fields.items() if n != tag]
        yield f"| `{name}` | {', '.join(keys) or '–'} |"
    yield ""


def _short(name: str, field: FieldInfo) -> str:
    return f"**`{name}`**" if field.is_required() else f"`{name}` ({_default(field)})"


def _table(model: type[BaseModel]) -> str:
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        shown = f"**`{name}`**" if field.is_required() else f"`{name}`"
        words = field.description or ("see below" if settings_models(field.annotation) else "")
        cells = (shown, _values(field), "" if field.is_required() else _default(field), words)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def settings_models(annotation: Any) -> list[type[BaseModel]]:
    """The settings models in an annotation, in its order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in typing.get_args(annotation) for m in settings_models(argument)]


def _is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) is list


def _whole_default(field: FieldInfo) -> str:
    return " Default: null." if field.default is None and not field.is_required() else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return str(getattr(value, "name", ""))
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else json.dumps(value).strip('"')


def _values(field: FieldInfo) -> str:
    """What may stand there: type and bounds."""
    signs = {Gt: ">", Ge: "≥", Lt: "<", Le: "≤"}
    bounds = [
        f"{sign} {getattr(rule, kind.__name__.lower()):g}"
        for rule in field.metadata
        for kind, sign in signs.items()
        if isinstance(rule, kind)
    ]
    return " ".join([_type(field.annotation), ", ".join(bounds)]).strip()


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if settings_models(annotation):
        return "list of sections" if _is_list(annotation) else "section"
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(a) for a in arguments if a is not type(None))
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}" if origin is list else f"{len(arguments)} numbers"
    names = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    return "mapping" if origin is dict else names.get(annotation, "anything")


if __name__ == "__main__":
    sys.stdout.write(reference())
