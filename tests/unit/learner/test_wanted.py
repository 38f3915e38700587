"""How many workers are wanted: properties of the pure part, and of the pool that follows it."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from services.learner.wanted import Balance, Held, Reading, Work, settled

RATES = st.floats(0.05, 20.0)
MARGINS = st.floats(0.0, 0.4)


def reading(time: float, *, demand: float, supply: float, workers: int = 1) -> Reading:
    """After `time` seconds in which the learner and each worker were always busy."""
    each = Work(time, supply * time)
    return Reading(time, Work(time, demand * time), {f"w{i}": each for i in range(workers)})


def balance(*, demand: float, supply: float, workers: int = 1) -> Balance:
    made = Balance()
    for time in (0.0, 30.0, 60.0):
        made.add(reading(time, demand=demand, supply=supply, workers=workers))
    return made


@given(RATES, RATES)
def test_the_number_serves_the_demand_and_one_fewer_would_not(demand, supply):
    wanted = balance(demand=demand, supply=supply).wanted(present=1, unfinished=True)
    assert wanted * supply >= demand * (1 - 1e-9)
    assert wanted == 1 or (wanted - 1) * supply < demand * (1 + 1e-9)


@given(RATES, RATES, st.integers(1, 50), st.integers(1, 50))
def test_it_does_not_depend_on_how_many_there_are(demand, supply, some, more):
    made = [balance(demand=demand, supply=supply, workers=n) for n in (some, more)]
    found = [
        one.wanted(present=n, unfinished=True) for one, n in zip(made, (some, more), strict=True)
    ]
    # A quotient that is a whole number may fall on either side of it by rounding.
    close = abs(demand / supply - round(demand / supply)) < 1e-6
    assert found[0] == found[1] or close


@given(st.floats(0.0, 100.0), st.integers(1, 100), MARGINS)
def test_an_answer_is_kept_at_once(share, present, margin):
    first = settled(share, present, margin=margin)
    assert first >= 1
    assert settled(share, first, margin=margin) == first


@given(
    st.floats(0.5, 50.0),
    st.integers(1, 60),
    st.lists(st.floats(-0.09, 0.09), min_size=1, max_size=20),
)
def test_noise_within_the_margin_moves_it_once_at_most(share, present, noise):
    """From a number that is exact for the demand, no noise of less than the margin moves it by more than one."""
    answers = [settled(share, present, margin=0.1)]
    for part in noise:
        answers.append(settled(share * (1 + part), answers[-1], margin=0.1))
    moves = [b - a for a, b in itertools.pairwise(answers) if a != b]
    exact = math.ceil(share)
    assert all(abs(answer - exact) <= max(1, math.ceil(0.2 * share)) for answer in answers[1:])
    # Up and down again would be an oscillation.
    assert not any(a > 0 > b for a, b in itertools.pairwise(moves)) or share > 4.5


@given(st.floats(0.1, 4.0), st.lists(st.floats(-0.04, 0.04), min_size=2, max_size=30))
def test_a_small_pool_does_not_oscillate(share, noise):
    answers = [settled(share, None, margin=0.1)]
    for part in noise:
        answers.append(settled(share * (1 + part), answers[-1], margin=0.1))
    ups = sum(b > a for a, b in itertools.pairwise(answers))
    downs = sum(b < a for a, b in itertools.pairwise(answers))
    assert ups + downs <= 1


@given(RATES, RATES, st.integers(0, 9))
def test_never_nobody_while_something_is_left(demand, supply, present):
    for made in (Balance(), balance(demand=demand, supply=supply)):
        assert made.wanted(present=present, unfinished=True) >= 1
        assert made.wanted(present=present, unfinished=False) == 0


def test_before_anything_is_known_the_pool_is_right():
    made = Balance()
    assert made.wanted(present=3, unfinished=True) == 3
    made.add(reading(0.0, demand=1.0, supply=1.0))
    made.add(Reading(10.0, Work(0.0, 0.0), {"w0": Work(0.0, 0.0)}))
    assert made.wanted(present=3, unfinished=True) == 3


def test_loading_a_model_is_no_work():
    """A worker that was first read after 100 busy seconds of loading counts from there."""
    made = Balance()
    made.add(reading(0.0, demand=4.0, supply=2.0))
    late = {"w0": Work(30.0, 60.0), "new": Work(100.0, 0.0)}
    made.add(Reading(30.0, Work(30.0, 120.0), late))
    made.add(Reading(60.0, Work(60.0, 240.0), {"w0": Work(60.0, 120.0), "new": Work(130.0, 60.0)}))
    assert made.supply == 2.0
    assert made.wanted(present=2, unfinished=True) == 2


def test_rates_are_those_of_the_window():
    made = Balance(window_seconds=60.0)
    groups = 0.0
    for time in range(0, 300, 10):
        groups += 10.0 * (1.0 if time < 150 else 3.0)
        made.add(
            Reading(float(time), Work(float(time), groups), {"w": Work(float(time), float(time))})
        )
    assert made.demand == 3.0
    assert made.wanted(present=1, unfinished=True) == 3


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=10))
def test_what_is_held_is_never_more_than_there_are(moments):
    held = Held(window_seconds=1000.0)
    for time, pending in enumerate(moments):
        held.add(float(time), pending)
        assert held.workers <= len(pending)
    if sum(not sum(pending) for pending in moments) > 1:  # of ten at most
        assert held.workers == 0


def test_a_moment_between_two_cohorts_lets_nobody_go():
    held = Held(window_seconds=60.0)
    for time in range(100):
        held.add(float(time), [0, 0, 0] if time % 15 == 14 else [5, 5, 4])
        if time > 10:
            assert held.workers == 3
    held.add(100.0, [5])
    assert held.workers == 1, "no more than there are"


def test_a_pool_that_runs_out_of_work_holds_nobody():
    """A fifth of the time without work: one of five is too many."""
    held = Held(window_seconds=60.0)
    for time in range(100):
        held.add(float(time), [0, 0] if time % 5 == 0 else [5, 5])
    assert held.workers == 0


def test_of_few_moments_one_without_work_counts():
    held = Held(window_seconds=60.0)
    for time, pending in ((0.0, [5, 5]), (30.0, [0, 0]), (60.0, [5, 5])):
        held.add(time, pending)
    assert held.workers == 0
    held.add(91.0, [5, 5])
    assert held.workers == 2
    held.add(100.0, [5, 1])
    assert held.workers == 2  # 6 entries, 5 at most by one
