"""Reward functions of the benchmarks, by TRL's convention."""

import time
from typing import Any


def letters(completions: list[str], **_: Any) -> list[float]:
    """Share of vowels: cheap, and seldom equal for two completions."""
    return [sum(map(text.count, "aeiou")) / max(1, len(text)) for text in completions]


def slow(completions: list[str], *, seconds: float, **_: Any) -> list[float]:
    """The same, by an emulated reward model that takes `seconds` for each completion."""
    time.sleep(seconds * len(completions))
    return letters(completions)


def constant(completions: list[str]) -> list[float]:
    """No work at all; neighbours differ, so that there are pairs."""
    return [float(index % 2) for index in range(len(completions))]
