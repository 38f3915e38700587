"""Finds a user's own code by its path: ``module:name`` or ``file.py:name``.

Used wherever a recipe may name a callable: reward functions, losses, sources of prompts.
"""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.errors import ConfigError


def load_object(path: str, *, key: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` names; dots in `name` reach into objects.

    `key` is the recipe's key that holds the path, for the error. Raises `ConfigError`.
    """
    place, separator, name = path.rpartition(":")
    if not separator or not place or not name:
        raise ConfigError(
            f"{key}: expected module:name or file.py:name, found {path!r}; "
            "for example my_package.rewards:brevity or rewards.py:brevity"
        )
    found: Any = _load_file(place, key) if place.endswith(".py") else _load_module(place, key)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{key}: {place} has no {name!r}; it has {_listed(found)}; correct the part after the colon"
            )
        found = getattr(found, part)
    return found


def load_callable(path: str, *, key: str) -> Any:
    """Like `load_object`, and raises `ConfigError` when what it finds can't be called."""
    found = load_object(path, key=key)
    if not callable(found):
        raise ConfigError(
            f"{key}: expected a function or a class at {path}, found {type(found).__name__}; name something callable"
        )
    return found


def _load_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{key}: there is no module {error.name!r} (looked in {', '.join(sys.path) or 'nowhere'}); "
                "install it, put its folder on PYTHONPATH, or name a file as file.py:name"
            ) from error
        raise _unusable(name, key, error) from error
    except Exception as error:
        raise _unusable(name, key, error) from error


def _load_file(place: str, key: str) -> ModuleType:
    file = Path(place).resolve()
    if not file.is_file():
        raise ConfigError(f"{key}: there is no file {file}; give the path of a Python file")
    # Registered under a name of its own: dataclasses look their module up, and a second load finds the first.
    name = f"offbeat_file_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {file} is not a Python file; give the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _unusable(str(file), key, error) from error
    return module


def _unusable(place: str, key: str, error: Exception) -> ConfigError:
    # Somebody else's code runs during an import, so any exception may come out of it.
    return ConfigError(
        f"{key}: importing {place} failed with {type(error).__name__}: {error}; correct that code"
    )


def _listed(found: Any) -> str:
    names = [name for name in dir(found) if not name.startswith("_")]
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "") if names else "nothing"
