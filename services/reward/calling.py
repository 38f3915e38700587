"""Calls reward functions by TRL's convention, and makes scores of what they return. The worker and `Score` use it.

A function is called with keyword arguments, and only with those that its signature names (all of them when it takes
``**kwargs``): `prompts`, `completions`, `completion_token_ids`, `finish_reasons`, and each column of the data set.
"""

import asyncio
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.streams.columns import PART, RESERVED
from offbeat.v1 import samples_pb2
from services.reward.counters import Counters
from services.reward.functions import RewardCallable
from services.reward.lane import Blocked, Lane, Overdue
from services.reward.records import Sample
from services.reward.scoring import (
    Component,
    FunctionBlocked,
    FunctionFailed,
    FunctionStuck,
    Values,
    check_values,
    combine,
)


class Caller:
    """Calls one function, and vouches for what it returns."""

    def __init__(
        self, function: RewardCallable, timeout_seconds: float, counters: Counters
    ) -> None:
        self.function = function
        self._timeout = timeout_seconds
        self._lane = Lane(f"reward-{function.name}")
        self._counters = counters.functions[function.name]

    async def __call__(self, samples: Sequence[Sample]) -> Values:
        """One value per sample; the samples have the same columns. Raises `FunctionFailed`."""
        arguments = self._arguments(samples)
        start = time.monotonic()
        self._counters.calls += 1
        try:
            returned = await self._call(arguments, len(samples))
            return check_values(self.function.name, returned, len(samples))
        except FunctionFailed:
            self._counters.failures += 1
            raise
        finally:
            self._counters.seconds += time.monotonic() - start

    async def close(self) -> None:
        """Lets go of what the function holds."""
        self._lane.close()
        await self.function.close()

    async def _call(self, arguments: dict[str, Any], count: int) -> Any:
        try:
            returned = await self._lane.call(lambda: self.function.call(**arguments), self._timeout)
        except Overdue as error:
            raise FunctionStuck(self.function.name, self._late(count)) from error
        except Blocked as error:
            text = (
                f"not called, because an earlier call has not returned within {self._timeout:g} s"
            )
            raise FunctionBlocked(self.function.name, text) from error
        except Exception as error:
            raise self._raised(error, count) from error
        if not inspect.isawaitable(returned):
            return returned
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await returned
        except Exception as error:
            if limit.expired():
                raise FunctionFailed(self.function.name, self._late(count)) from error
            raise self._raised(error, count) from error

    def _late(self, count: int) -> str:
        return (
            f"expected values for {count} completions within {self._timeout:g} s, found none; "
            "give the function a shorter time limit of its own, or raise reward.timeout_seconds"
        )

    def _raised(self, error: Exception, count: int) -> FunctionFailed:
        text = f"expected {count} values, but it raised {type(error).__name__}: {str(error)[:500]}"
        return FunctionFailed(self.function.name, text)

    def _arguments(self, samples: Sequence[Sample]) -> dict[str, Any]:
        columns = samples[0].columns
        reserved = sorted(set(columns) & set(RESERVED))
        if reserved:
            raise FunctionFailed(
                self.function.name,
                f"expected columns with other names than {', '.join(RESERVED)}, found the column {reserved[0]!r}; "
                "rename it in the data",
            )
        offered: dict[str, Callable[[], list[Any]]] = {
            "prompts": lambda: [sample.prompt for sample in samples],
            "completions": lambda: [sample.completion for sample in samples],
            "completion_token_ids": lambda: [
                list(sample.completion_token_ids) for sample in samples
            ],
            "finish_reasons": lambda: [sample.finish_reason for sample in samples],
        }
        offered |= {name: _column(name, samples) for name in columns}
        missing = sorted(self.function.required - set(offered))
        if missing:
            raise FunctionFailed(
                self.function.name,
                f"expected the column {missing[0]!r}, found {', '.join(sorted(columns)) or 'no column'}; "
                "add it to the data, or name another one",
            )
        return {name: values() for name, values in offered.items() if self.function.takes(name)}


def _column(name: str, samples: Sequence[Sample]) -> Callable[[], list[Any]]:
    return lambda: [sample.columns[name] for sample in samples]


class Scorer:
    """All reward functions of a recipe."""

    def __init__(
        self, functions: Sequence[RewardCallable], timeout_seconds: float, counters: Counters
    ) -> None:
        self._callers = [Caller(function, timeout_seconds, counters) for function in functions]
        self._by_part = any(function.parts is not None for function in functions)

    @property
    def names(self) -> list[str]:
        """Names of the functions, in the recipe's order."""
        return [caller.function.name for caller in self._callers]

    async def score(self, samples: Sequence[Sample]) -> list[samples_pb2.CompletionScore]:
        """The scores, in order. Raises `FunctionFailed` (of the first function in the recipe's order that failed).

        Functions run side by side; the calls of one synchronous function run one after the other.
        """
        # A function gets whole columns, so samples that have different ones come in different calls; and some
        # functions are for evaluations only, or for some parts of a mixture.
        alike: dict[tuple[bool, str | None, frozenset[str]], list[int]] = defaultdict(list)
        for index, sample in enumerate(samples):
            key = (sample.evaluation, self._part(sample), frozenset(sample.columns))
            alike[key].append(index)
        scores: dict[int, samples_pb2.CompletionScore] = {}
        for indices in alike.values():
            part = await self._score_alike([samples[index] for index in indices])
            scores |= dict(zip(indices, part, strict=True))
        return [scores[index] for index in range(len(samples))]

    async def close(self) -> None:
        """Lets go of what the functions hold."""
        for caller in self._callers:
            await caller.close()

    def _part(self, sample: Sample) -> str | None:
        """The sample's part of a mixture, where that decides which functions are called."""
        part = sample.columns.get(PART) if self._by_part else None
        return part if isinstance(part, str) else None

    async def _score_alike(self, samples: Sequence[Sample]) -> list[samples_pb2.CompletionScore]:
        part, evaluation = self._part(samples[0]), samples[0].evaluation
        callers = [c for c in self._callers if c.function.scores(part, evaluation=evaluation)]
        if not callers:
            raise FunctionFailed(
                ", ".join(self.names),
                f"expected a function that scores the part {part!r} (column {PART!r}), found none; see `parts`",
            )
        answers = await asyncio.gather(
            *(caller(samples) for caller in callers), return_exceptions=True
        )
        components = []
        for caller, answer in zip(callers, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            function = caller.function
            components.append(Component(function.name, answer, function.weight, function.role))
        return combine(components, len(samples))
