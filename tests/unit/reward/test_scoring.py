"""Values become scores, or an error that names the function and the place; never anything else."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.scoring import Component, FunctionFailed, Role, check_values, combine

FINITE = st.floats(-1e6, 1e6)
VALUES = st.one_of(st.none(), FINITE)


def _totals(*components: Component) -> list[float]:
    return [score.total for score in combine(components, len(components[0].values))]


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.int64(3), Fraction(1, 2)])
def test_numbers_of_every_kind_are_taken(value):
    assert check_values("f", [value, None], 2) == [float(value), None]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0, math.nan], ["finite", "nan", "index 1"]),
        ([1.0, -math.inf], ["finite", "-inf", "index 1"]),
        ([10**400, 1.0], ["finite", "inf", "index 0"]),
        ([np.float64("nan"), 1.0], ["finite", "nan", "index 0"]),
        ([1.0], ["expected 2 values, found 1", "index 1"]),
        ([1.0, 2.0, 3.0], ["expected 2 values, found 3", "index 2"]),
        ([], ["expected 2 values, found 0", "index 0"]),
        ([1.0, "2"], ["a number or None, found str '2' at index 1"]),
        ([1.0, Decimal(1)], ["found Decimal", "index 1"]),
        ([1.0, 1j], ["found complex", "index 1"]),
        ([[1.0], 1.0], ["found list", "index 0"]),
        ("ab", ["a list of 2", "found str"]),
        (None, ["a list of 2", "found NoneType"]),
        ({0: 1.0, 1: 1.0}, ["a list of 2", "found dict"]),
        (np.ones(2), ["a list of 2", "found ndarray"]),
    ],
)
def test_everything_else_is_an_error(returned, words):
    with pytest.raises(FunctionFailed) as raised:
        check_values("mine", returned, 2)
    assert raised.value.function == "mine"
    for word in ["'mine'", *words]:
        assert word in str(raised.value)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(
            st.tuples(FINITE, st.lists(VALUES, min_size=n, max_size=n)), min_size=1, max_size=4
        )
    )
)
def test_total_is_the_weighted_sum_of_what_is_there(given_components):
    components = [
        Component(f"f{i}", values, weight) for i, (weight, values) in enumerate(given_components)
    ]
    count = len(components[0].values)
    rows = [[c.values[i] for c in components] for i in range(count)]
    if any(all(value is None for value in row) for row in rows):
        with pytest.raises(FunctionFailed, match="None from all"):
            combine(components, count)
        return
    for score, row in zip(combine(components, count), rows, strict=True):
        expected = sum(c.weight * v for c, v in zip(components, row, strict=True) if v is not None)
        assert score.total == pytest.approx(expected, rel=1e-9, abs=1e-6)
        assert [c.name for c in score.components] == [c.name for c in components]
        found = [c.value if c.HasField("value") else None for c in score.components]
        assert found == row


@settings(deadline=None, max_examples=50)
@given(st.lists(FINITE, min_size=1, max_size=6), FINITE)
def test_zero_and_none_are_not_the_same(values, other):
    zero = combine([Component("a", [0.0] * len(values)), Component("b", values)], len(values))
    none = combine([Component("a", [None] * len(values)), Component("b", values)], len(values))
    assert [s.total for s in zero] == [s.total for s in none]
    assert all(s.components[0].HasField("value") for s in zero)
    assert not any(s.components[0].HasField("value") for s in none)


def test_a_replacement_is_the_total_and_the_others_stay_readable():
    verifier = Component("verifier", [1.0, 1.0, None], weight=2.0)
    replacement = Component("missing_eos", [None, -1.0, -1.0], role=Role.REPLACEMENT)
    assert _totals(verifier, replacement) == [2.0, -1.0, -1.0]
    assert combine([verifier, replacement], 3)[1].components[0].value == 1.0


def test_a_penalty_is_no_score_by_itself():
    penalty = Component("missing_eos", [-1.0], weight=0.5, role=Role.PENALTY)
    assert _totals(Component("verifier", [1.0]), penalty) == [0.5]
    with pytest.raises(FunctionFailed, match=r"verifier.*None from all at index 0"):
        combine([Component("verifier", [None]), penalty], 1)


def test_a_sum_that_overflows_is_an_error():
    for weight in (1.0, -1.0):
        parts = [Component("a", [1e308], 10.0), Component("b", [1e308], 10.0 * weight)]
        with pytest.raises(FunctionFailed, match="finite total"):
            combine(parts, 1)
