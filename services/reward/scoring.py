"""How the values of reward functions become scores. Pure: no I/O, no clock.

A value is a finite number, or None: the function drops itself for this sample. Everything else is a failure, and a
failure never becomes a number.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from offbeat.errors import RewardError
from offbeat.v1 import samples_pb2

Values = list[float | None]


class FunctionFailed(RewardError):
    """A reward function failed; `function` is its name in the recipe."""

    def __init__(self, function: str, text: str) -> None:
        super().__init__(f"reward function {function!r}: {text}")
        self.function = function


class FunctionStuck(FunctionFailed):
    """A reward function did not return in time and can't be stopped: only the end of the process does that."""


class FunctionBlocked(FunctionFailed):
    """A reward function was not called at all, because an earlier call of it is stuck."""


class Role(StrEnum):
    """What a component does to the total."""

    SCORE = "score"
    """Its value times its weight is added; at least one of these must have a value."""
    PENALTY = "penalty"
    """Its value times its weight is added, but it is no score by itself."""
    REPLACEMENT = "replacement"
    """Its value, where it has one, is the total."""
    REPORT = "report"
    """Its value goes along and does nothing to the total."""


@dataclass(frozen=True)
class Component:
    """What one function said about each of the samples."""

    name: str
    values: Values
    weight: float = 1.0
    role: Role = Role.SCORE


def check_values(function: str, returned: Any, count: int) -> Values:
    """What a function returned, as `count` floats or None. Raises `FunctionFailed` naming the first bad index."""
    if not isinstance(returned, list | tuple):
        raise FunctionFailed(
            function,
            f"expected a list of {count} numbers or None, found {type(returned).__name__}; return one per completion",
        )
    if len(returned) != count:
        raise FunctionFailed(
            function,
            f"expected {count} values, found {len(returned)} (the first that is missing or too many is at index "
            f"{min(count, len(returned))}); return one per completion",
        )
    return [
        None if value is None else _number(function, value, at) for at, value in enumerate(returned)
    ]


def _number(function: str, value: Any, index: int) -> float:
    if not isinstance(value, numbers.Real):
        raise FunctionFailed(
            function,
            f"expected a number or None, found {type(value).__name__} {str(value)[:80]!r} at index {index}; "
            "convert it with float()",
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FunctionFailed(
            function,
            f"expected a finite number or None, found {number} at index {index}; "
            "return None where there is no answer",
        )
    return number


def combine(components: Sequence[Component], count: int) -> list[samples_pb2.CompletionScore]:
    """The scores of `count` samples: the weighted sum of the components that have a value.

    Raises `FunctionFailed` for the first sample that no function gave a score, or whose sum is not finite.
    """
    return [
        samples_pb2.CompletionScore(
            total=_total(components, index),
            components=[
                samples_pb2.ScoreComponent(name=component.name, value=component.values[index])
                for component in components
            ],
        )
        for index in range(count)
    ]


def _total(components: Sequence[Component], index: int) -> float:
    for component in components:
        value = component.values[index]
        if component.role is Role.REPLACEMENT and value is not None:
            return value
    names = ", ".join(component.name for component in components if component.role is Role.SCORE)
    if all(
        component.values[index] is None for component in components if component.role is Role.SCORE
    ):
        raise FunctionFailed(
            names,
            f"expected a value from at least one function, found None from all at index {index}; "
            "add a function that always has an answer, or let one of these return a number",
        )
    parts = [
        component.weight * value
        for component in components
        if component.role in {Role.SCORE, Role.PENALTY}
        and (value := component.values[index]) is not None
    ]
    try:
        total = math.fsum(parts)
    except (OverflowError, ValueError):
        total = math.inf
    if not math.isfinite(total):
        raise FunctionFailed(
            names,
            f"expected a finite total, found {parts} at index {index}; make values or weights smaller",
        )
    return total
