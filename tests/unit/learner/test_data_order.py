"""Which prompt an ordinal gets: a pure function of seed and ordinal, in the shares that the recipe asks for."""

from collections import Counter, defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import DataError
from services.learner.data.order import EpochOrder, MixtureOrder, Shares, interleave

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 50), st.floats(0.01, 100, allow_nan=False)), min_size=1, max_size=6
)
QUICK = settings(deadline=None, max_examples=40)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_is_a_permutation(shuffle):
    order = EpochOrder(7, seed="3", shuffle=shuffle)
    epochs = [[order.row(epoch * 7 + place) for place in range(7)] for epoch in range(3)]
    assert all(Counter(epoch) == Counter(range(7)) for epoch in epochs)
    assert (epochs[0] != epochs[1]) == shuffle


def test_no_rows_are_an_error():
    with pytest.raises(DataError, match="no usable prompts"):
        EpochOrder(0, seed="0", shuffle=True)


@QUICK
@given(WEIGHTS, st.integers(0, 5000))
def test_a_part_gets_its_share_of_any_stretch(weights, start):
    shares = Shares(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    counts = Counter(shares.part(start + n)[0] for n in range(200))
    for part, weight in enumerate(weights):
        expected = 200 * Fraction(str(weight)) / total
        assert abs(counts[part] - expected) < 2 * len(weights)


@QUICK
@given(WEIGHTS)
def test_places_in_a_part_are_counted_without_a_gap(weights):
    seen: dict[int, list[int]] = defaultdict(list)
    for part, place in map(Shares(weights).part, range(300)):
        seen[part].append(place)
    assert all(places == list(range(len(places))) for places in seen.values())


def test_shares_are_exact_where_floats_are_not():
    counts = Counter(Shares([0.1, 0.2, 0.7]).part(ordinal)[0] for ordinal in range(10_000))
    assert counts == {0: 1_000, 1: 2_000, 2: 7_000}
    assert [Shares([1, 1]).part(n)[0] for n in range(6)] == [1, 0, 1, 0, 1, 0]


@QUICK
@given(SIZES, st.randoms(use_true_random=False), st.integers(0, 2**31), st.booleans())
def test_the_row_of_an_ordinal_does_not_depend_on_what_was_asked_before(
    sizes, chance, seed, shuffle
):
    weights = [chance.randint(1, 9) for _ in sizes]
    forward = MixtureOrder(sizes, weights, seed=seed, shuffle=shuffle)
    expected = [forward.row(ordinal) for ordinal in range(120)]
    ordinals = list(range(120))
    chance.shuffle(ordinals)
    resumed = MixtureOrder(sizes, weights, seed=seed, shuffle=shuffle)
    assert {ordinal: resumed.row(ordinal) for ordinal in ordinals} == dict(enumerate(expected))


@QUICK
@given(SIZES, st.integers(0, 2**31))
def test_a_part_that_runs_out_begins_its_next_epoch_whatever_the_others_do(sizes, seed):
    order = MixtureOrder(sizes, [1.0] * len(sizes), seed=seed, shuffle=True)
    rows: dict[int, list[int]] = defaultdict(list)
    for part, row in map(order.row, range(60 * len(sizes))):
        rows[part].append(row)
    for part, size in enumerate(sizes):
        epochs = [rows[part][start : start + size] for start in range(0, len(rows[part]), size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs[:-1])


def test_a_source_alone_and_first_in_a_mixture_has_the_same_order():
    alone = EpochOrder(8, seed="5", shuffle=True)
    mixed = MixtureOrder([8, 8], [1, 1], seed=5, shuffle=True)
    rows: dict[int, list[int]] = defaultdict(list)
    for part, row in map(mixed.row, range(32)):
        rows[part].append(row)
    assert rows[0] == [alone.row(index) for index in range(16)]
    assert rows[1] != rows[0]


@QUICK
@given(SIZES, st.randoms(use_true_random=False))
def test_held_out_rows_come_once_and_each_beginning_holds_the_shares(sizes, chance):
    weights = [chance.randint(1, 5) for _ in sizes]
    places = interleave(sizes, weights)
    assert sorted(places) == [(p, r) for p, size in enumerate(sizes) for r in range(size)]
    for end in range(1, len(places) + 1):
        counts = Counter(part for part, _ in places[:end])
        if any(counts[part] == size for part, size in enumerate(sizes)):
            break
        for part, weight in enumerate(weights):
            assert abs(counts[part] - end * weight / sum(weights)) <= len(sizes)
