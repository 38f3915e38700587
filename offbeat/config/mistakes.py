"""Words for what is wrong with a recipe: the key, what was found, what is allowed. Used by `load`."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Models = list[type[BaseModel]]

REFERENCE = "docs/recipe.md"
SECTION_TYPES = frozenset({"model_type", "model_attributes_type", "dict_type"})


def describe(root: type[BaseModel], item: Any) -> str:
    """One line about an error of pydantic, an entry of `ValidationError.errors()`, in a tree of the model `root`."""
    loc, kind = item["loc"], item["type"]
    keys, models, field = _walk(root, loc)
    key = ".".join(keys) or "recipe"
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_choice(keys[-1], _keys_of(_walk(root, loc[:-1])[1]))}"
    if kind == "missing":
        return f"{key}: required, but missing{_what_is_missing(models, field)}"
    if kind == "union_tag_invalid":
        return _unknown_tag(key, item["ctx"])
    if kind == "union_tag_not_found":
        tag = item["ctx"]["discriminator"].strip("'")
        return f"{key}.{tag}: required, but missing; allowed: {', '.join(_tags(models, tag))}"
    found = f", found {str(item.get('input'))[:80]!r}"
    if kind in SECTION_TYPES:
        return f"{key}: expected a section{_example(models, item.get('input'))}{found}"
    text = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    return f"{key}: {text}{'' if kind == 'value_error' else found}"


def _walk(
    root: type[BaseModel], loc: Sequence[str | int]
) -> tuple[list[str], Models, FieldInfo | None]:
    """Follows a location. Gives its keys as they stand in the recipe, which has no tags of unions between them; the
    settings models that may stand there; and the field there, if it is one."""
    keys: list[str] = []
    models: Models = [root]
    field: FieldInfo | None = None
    for part in loc:
        if isinstance(part, int):
            keys.append(str(part))
            continue
        tagged = [model for model in models if part in _own_tags(model)]
        if len(models) > 1 and tagged:
            models = tagged
            continue
        keys.append(part)
        field = next((m.model_fields[part] for m in models if part in m.model_fields), None)
        models = list(_models(field.annotation)) if field is not None else []
    return keys, models, field


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models(argument)


def _own_tags(model: type[BaseModel], *names: str) -> tuple[str, ...]:
    """The values of `name` or `kind` by which a union tells this model from the others."""
    for name in names or ("name", "kind"):
        found = model.model_fields.get(name)
        if found is not None and found.is_required():
            values = getattr(found.annotation, "__args__", ())
            return tuple(value for value in values if isinstance(value, str))
    return ()


def _tags(models: Models, name: str) -> list[str]:
    return [tag for model in models for tag in _own_tags(model, name)]


def _keys_of(models: Models) -> list[str]:
    return sorted(models[0].model_fields) if models else []


def _required(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if field.is_required()]


def _choice(found: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(found, allowed, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}allowed here: {', '.join(allowed) or f'see {REFERENCE}'}"


def _unknown_tag(key: str, context: dict[str, str]) -> str:
    name, found = context["discriminator"].strip("'"), context["tag"]
    allowed = [word.strip().strip("'") for word in context["expected_tags"].split(",")]
    return f"{key}.{name}: there is no {found!r}; {_choice(found, allowed)}"


def _what_is_missing(models: Models, field: FieldInfo | None) -> str:
    """What would have to stand there: the keys that a section needs, or what a value means."""
    if len(models) == 1:
        needed = _required(models[0])
        return f"; a section with at least {', '.join(needed)}" if needed else ""
    tags = _tags(models, "name") or _tags(models, "kind")
    if tags:
        return f"; a section such as {_first_tag(models)}, see {REFERENCE}"
    return f" ({field.description.rstrip('.')})" if field and field.description else ""


def _example(models: Models, found: object) -> str:
    if len(models) > 1 and _first_tag(models):
        named = next((name for name in ("name", "kind") if found in _tags(models, name)), None)
        return f" such as {f'{{{named}: {found}}}' if named else _first_tag(models)}"
    keys = ", ".join(_required(models[0]) or _keys_of(models)[:3]) if models else ""
    return f" with keys such as {keys}" if keys else ""


def _first_tag(models: Models) -> str:
    for name in ("name", "kind"):
        tags = _tags(models, name)
        if tags:
            return f"{{{name}: {tags[0]}}}"
    return ""
