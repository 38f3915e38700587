"""Finds the reward functions of a recipe, built-in by name or yours by path, and reads their signatures.

A built-in is a class: made once from the recipe's `params`, then called. Yours may be one too; a plain function gets
`params` as further keyword arguments of each call. Modules are imported only when a recipe names them, so that a
worker without a reward model starts without torch.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from offbeat.config.workers import RewardFunction
from offbeat.errors import ConfigError, OffbeatError
from offbeat.imports import load_callable
from services.reward.scoring import Role

BUILT_IN = {
    "exact_match": "services.reward.functions.exact_match:ExactMatch",
    "judge": "services.reward.functions.judge:Judge",
    "length_penalty": "services.reward.functions.length_penalty:LengthPenalty",
    "math": "services.reward.functions.math_answer:MathAnswer",
    "missing_eos": "services.reward.functions.missing_eos:MissingEos",
    "perplexity": "services.reward.functions.perplexity:Perplexity",
    "reasoning_gym": "services.reward.functions.reasoning_gym:ReasoningGym",
    "reward_model": "services.reward.functions.reward_model:RewardModel",
    "reward_model_win": "services.reward.functions.reward_model_win:RewardModelWin",
}


@dataclass(frozen=True)
class RewardCallable:
    """A reward function that is ready to be called, and what its signature says."""

    name: str
    call: Callable[..., Any]
    weight: float = 1.0
    role: Role = Role.SCORE
    named: frozenset[str] = frozenset()
    """Arguments that the signature names."""
    required: frozenset[str] = frozenset()
    """Those of them without a default."""
    bound: frozenset[str] = frozenset()
    """Arguments that the recipe's params have set."""
    takes_all: bool = False
    """Whether it takes ``**kwargs``."""
    evaluation_only: bool = False
    """Whether it is left out for what is trained on."""
    parts: frozenset[str] | None = None
    """Parts of a mixture that it scores; None: all."""

    def scores(self, part: object, *, evaluation: bool) -> bool:
        """Whether it is called for samples of this part, in an evaluation or not."""
        return (evaluation or not self.evaluation_only) and (
            self.parts is None or part in self.parts
        )

    def takes(self, argument: str) -> bool:
        """Whether `argument` is passed to it."""
        return argument not in self.bound and (self.takes_all or argument in self.named)

    async def close(self) -> None:
        """Lets go of what the function holds, if it has a `close`, plain or async."""
        close = getattr(self.call, "close", None)
        if callable(close):
            closing = close()
            if inspect.isawaitable(closing):
                await closing


def load_functions(settings: Sequence[RewardFunction]) -> list[RewardCallable]:
    """Imports and makes all functions. May take long (a reward model is loaded). Raises `ConfigError`, `ModelError`."""
    functions = [_load(f"reward.functions.{index}", item) for index, item in enumerate(settings)]
    if not any(function.role is Role.SCORE for function in functions):
        names = ", ".join(function.name for function in functions)
        raise ConfigError(
            f"reward.functions: expected at least one that gives scores to train on, found none ({names}); add one"
        )
    return functions


def _load(key: str, item: RewardFunction) -> RewardCallable:
    path = item.path
    if path is None:
        if item.name not in BUILT_IN:
            raise ConfigError(
                f"{key}.name: expected a built-in ({', '.join(BUILT_IN)}) because path is not set, "
                f"found {item.name!r}; correct it, or set path to your own function"
            )
        path = BUILT_IN[item.name]
    found = load_callable(path, key=f"{key}.path")
    call = (
        _make(key, found, item.params) if inspect.isclass(found) else _bind(key, found, item.params)
    )
    role = Role.REPORT if item.use == "evaluation" else getattr(call, "role", Role.SCORE)
    if role is Role.REPLACEMENT and item.weight != 1.0:
        raise ConfigError(
            f"{key}.weight: not used by {item.name}, which replaces the total; found {item.weight:g}, remove it"
        )
    bound = frozenset() if inspect.isclass(found) else frozenset(item.params)
    return describe(key, item, call, role, bound)


def _make(key: str, made: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """An instance of a class, made from the params."""
    try:
        instance = made(**params)
    except OffbeatError as error:
        raise type(error)(f"{key}: {error}") from error
    except ValidationError as error:
        raise ConfigError(
            f"{key}.params: {'; '.join(_described(item) for item in error.errors())}"
        ) from None
    except Exception as error:
        # Somebody else's constructor may raise anything; for the user all of it means: these params don't work.
        raise ConfigError(
            f"{key}.params: making {getattr(made, '__name__', made)} from {params} failed with "
            f"{type(error).__name__}: {error}; correct the params"
        ) from error
    if not callable(instance):
        raise ConfigError(
            f"{key}.path: expected a function or a class with __call__, found {type(instance).__name__} without one"
        )
    return instance


def _described(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown {name}; remove it"
    shown = "" if error["type"] == "missing" else f", found {str(error['input'])[:80]!r}"
    return f"{name}: {error['msg'].removeprefix('Value error, ')}{shown}"


def _bind(key: str, function: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """A function with the params set."""
    if not params:
        return function
    try:
        inspect.signature(function).bind_partial(**params)
    except TypeError as error:
        raise ConfigError(
            f"{key}.params: the function does not take them: {error}; correct the params"
        ) from error
    return functools.partial(function, **params)


def describe(
    key: str, item: RewardFunction, call: Callable[..., Any], role: Role, bound: frozenset[str]
) -> RewardCallable:
    """What a callable's signature says. Raises `ConfigError` when it can't be called with names."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}.path: {item.path} has no readable signature; wrap it in a function"
        ) from error
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise ConfigError(
            f"{key}.path: expected arguments that can be passed by name, found positional-only ones; remove the /"
        )
    named = [p for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    return RewardCallable(
        name=item.name,
        call=call,
        weight=item.weight,
        role=role,
        named=frozenset(p.name for p in named),
        required=frozenset(p.name for p in named if p.default is p.empty) - bound,
        bound=bound,
        takes_all=inspect.Parameter.VAR_KEYWORD in kinds,
        evaluation_only=item.use == "evaluation",
        parts=None if item.parts is None else frozenset(item.parts),
    )
