"""Functions are called by TRL's convention; whatever they do wrong is their error and nobody else's."""

import asyncio
import functools
import threading
import time

import pytest
from pydantic import ValidationError

from offbeat.config.workers import RewardFunction, RewardSettings
from services.reward.calling import Scorer
from services.reward.counters import Counters
from services.reward.functions.registry import describe, load_functions
from services.reward.lane import Blocked, Lane, Overdue
from services.reward.records import Sample
from services.reward.scoring import FunctionBlocked, FunctionFailed, FunctionStuck, Role

SAMPLES = [
    Sample("p0", "c0", {"answer": "a0", "level": 0}, [1, 2], "stop"),
    Sample("p1", "c1", {"answer": "a1", "level": 1}, [3], "length"),
]


def _scorer(*functions, timeout: float = 30.0) -> Scorer:
    described = [
        describe("key", RewardFunction(name=f"f{i}"), function, Role.SCORE, frozenset())
        for i, function in enumerate(functions)
    ]
    return Scorer(described, timeout, Counters())


async def _totals(scorer: Scorer, samples=SAMPLES) -> list[float]:
    return [score.total for score in await scorer.score(samples)]


async def test_a_function_gets_what_its_signature_names():
    seen = []

    def plain(prompts, completions):
        seen.append((prompts, completions))
        return [1.0, 2.0]

    def picky(completions, answer, *, finish_reasons, completion_token_ids, other=None):
        seen.append((completions, answer, finish_reasons, completion_token_ids, other))
        return [1.0, 2.0]

    def everything(completions, **columns):
        seen.append(columns)
        return [1.0, 2.0]

    assert await _totals(_scorer(plain, picky, everything)) == [3.0, 6.0]
    texts = (["p0", "p1"], ["c0", "c1"])
    rest = {"finish_reasons": ["stop", "length"], "completion_token_ids": [[1, 2], [3]]}
    assert texts in seen
    assert (["c0", "c1"], ["a0", "a1"], ["stop", "length"], [[1, 2], [3]], None) in seen
    assert {"prompts": texts[0], "answer": ["a0", "a1"], "level": [0, 1]} | rest in seen


async def test_async_functions_and_callables_of_all_kinds():
    async def asynchronous(completions):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    class Made:
        async def __call__(self, completions):
            return [10.0] * len(completions)

    wrapped = functools.wraps(asynchronous)(lambda **kw: asynchronous(**kw))
    assert await _totals(_scorer(asynchronous, Made(), wrapped)) == [12.0, 12.0]


def _raises(error):
    def function(completions):
        raise error

    async def asynchronous(completions):
        raise error

    return [function, asynchronous]


ERRORS = [
    ValueError("odd"),
    KeyError("x"),
    StopIteration("end"),
    AssertionError(),
    TimeoutError("t"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_what_a_function_raises_names_it(error):
    for function in _raises(error):
        with pytest.raises(FunctionFailed) as raised:
            await _scorer(lambda completions: [1.0, 1.0], function).score(SAMPLES)
        assert raised.value.function == "f1"
        # Python itself turns a StopIteration that leaves a coroutine into a RuntimeError.
        assert type(error).__name__ in str(raised.value) or "StopIteration" in str(raised.value)


async def test_exit_in_a_function_does_not_end_the_worker():
    with pytest.raises(FunctionFailed, match="SystemExit"):
        await _scorer(lambda completions: exit(3)).score(SAMPLES)


async def test_first_failure_in_the_order_of_the_recipe_is_told():
    async def late(completions):
        await asyncio.sleep(0.02)
        raise ValueError("late")

    def early(completions):
        raise ValueError("early")

    with pytest.raises(FunctionFailed, match=r"'f0'.*late"):
        await _scorer(late, early).score(SAMPLES)


async def test_a_missing_column_is_named_with_those_that_are_there():
    with pytest.raises(FunctionFailed, match="column 'solution', found answer, level"):
        await _scorer(lambda completions, solution: [1.0, 1.0]).score(SAMPLES)


async def test_a_column_must_not_have_the_name_of_an_argument():
    samples = [Sample("p", "c", {"prompts": "x"})]
    with pytest.raises(FunctionFailed, match="found the column 'prompts'"):
        await _scorer(lambda completions: [1.0]).score(samples)


async def test_samples_with_other_columns_come_in_other_calls_and_keep_their_order():
    calls = []

    def function(completions, **columns):
        calls.append(sorted(columns))
        return [float(text) for text in completions]

    samples = [Sample("p", str(i), {"a": 1} if i % 2 else {"b": 1}) for i in range(6)]
    assert await _totals(_scorer(function), samples) == [0, 1, 2, 3, 4, 5]
    assert len(calls) == 2


async def test_calls_of_one_synchronous_function_do_not_overlap():
    inside = 0

    def function(completions):
        nonlocal inside
        inside += 1
        time.sleep(0.005)
        alone = inside == 1
        inside -= 1
        return [float(alone)] * len(completions)

    scorer = _scorer(function)
    rounds = await asyncio.gather(*(_totals(scorer) for _ in range(5)))
    assert rounds == [[1.0, 1.0]] * 5


async def test_an_async_function_that_takes_too_long_is_cancelled():
    cancelled = asyncio.Event()

    async def function(completions):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(FunctionFailed, match=r"within 0\.05 s") as raised:
        await _scorer(function, timeout=0.05).score(SAMPLES)
    assert not isinstance(raised.value, FunctionStuck)
    assert cancelled.is_set()


async def test_a_synchronous_one_is_stuck_and_blocks_the_next_call_until_it_returns():
    release = threading.Event()

    def function(completions):
        release.wait(30)
        return [1.0, 1.0]

    scorer = _scorer(function, timeout=0.05)
    with pytest.raises(FunctionStuck, match=r"within 0\.05 s"):
        await scorer.score(SAMPLES)
    with pytest.raises(FunctionBlocked, match="not called"):
        await scorer.score(SAMPLES)
    release.set()
    while True:
        try:
            assert await _totals(scorer) == [1.0, 1.0]
            break
        except FunctionBlocked:
            await asyncio.sleep(0.001)
    await scorer.close()


async def test_a_waiting_call_is_told_that_the_lane_is_blocked():
    lane, release = Lane("test"), threading.Event()
    first = asyncio.create_task(lane.call(lambda: release.wait(30), 0.05))
    await asyncio.sleep(0)
    second = asyncio.create_task(lane.call(lambda: 2, 30))
    with pytest.raises(Overdue):
        await first
    with pytest.raises(Blocked):
        await second
    release.set()
    lane.close()


async def test_a_call_that_nobody_waits_for_any_more_is_not_started():
    lane, release, calls = Lane("test"), threading.Event(), []
    first = asyncio.create_task(lane.call(lambda: release.wait(30), 30))
    await asyncio.sleep(0)
    second = asyncio.create_task(lane.call(lambda: calls.append("second"), 30))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    assert await first
    assert await lane.call(lambda: "third", 30) == "third"
    assert calls == []
    lane.close()


async def test_functions_for_evaluations_see_nothing_that_is_trained_on():
    seen = []

    def reward(completions):
        return [1.0] * len(completions)

    def gold(completions):
        seen.append(completions)
        return [7.0] * len(completions)

    functions = [
        describe("key", RewardFunction(name="reward"), reward, Role.SCORE, frozenset()),
        describe(
            "key", RewardFunction(name="gold", use="evaluation"), gold, Role.REPORT, frozenset()
        ),
    ]
    training, held = Sample("p", "trained", {}), Sample("p", "held", {}, evaluation=True)
    scores = await Scorer(functions, 30.0, Counters()).score([training, held, training])
    assert seen == [["held"]]
    assert [score.total for score in scores] == [1.0, 1.0, 1.0]
    assert [[c.name for c in score.components] for score in scores] == [
        ["reward"],
        ["reward", "gold"],
        ["reward"],
    ]
    assert scores[1].components[1].value == 7.0


def test_a_function_for_evaluations_reports_whatever_it_would_be_otherwise():
    settings = [
        RewardFunction(name="exact_match"),
        RewardFunction(
            name="missing_eos", params={"mode": "replace", "value": -1}, use="evaluation"
        ),
    ]
    reward, reported = load_functions(settings)
    assert (reward.role, reward.evaluation_only) == (Role.SCORE, False)
    assert (reported.role, reported.evaluation_only) == (Role.REPORT, True)


def test_settings_that_would_have_no_effect_are_refused():
    with pytest.raises(ValidationError, match="weight: not used"):
        RewardFunction(name="exact_match", use="evaluation", weight=2.0)
    with pytest.raises(ValidationError, match="training has no reward"):
        RewardSettings(functions=[RewardFunction(name="exact_match", use="evaluation")])


async def test_functions_score_the_parts_that_they_are_for():
    seen = []

    def sums(completions):
        seen.append(("sums", completions))
        return [1.0] * len(completions)

    def talk(completions):
        seen.append(("talk", completions))
        return [2.0] * len(completions)

    def both(completions):
        return [0.5] * len(completions)

    items = [("sums", sums, ["a"]), ("talk", talk, ["b"]), ("both", both, None)]
    described = [
        describe("key", RewardFunction(name=name, parts=parts), call, Role.SCORE, frozenset())
        for name, call, parts in items
    ]
    samples = [Sample("p", text, {"part": part}) for text, part in zip("xyz", "aba", strict=True)]
    scores = await Scorer(described, 30.0, Counters()).score(samples)
    assert [score.total for score in scores] == [1.5, 2.5, 1.5]
    assert [[c.name for c in score.components] for score in scores] == [
        *(["sums", "both"], ["talk", "both"], ["sums", "both"]),
    ]
    assert seen == [("sums", ["x", "z"]), ("talk", ["y"])]
    with pytest.raises(FunctionFailed, match="expected a function that scores the part None"):
        await Scorer(described[:2], 30.0, Counters()).score([Sample("p", "x", {})])
