"""Nobody is given up for a time in which nobody could have answered, and nobody is waited for without end."""

from hypothesis import given
from hypothesis import strategies as st

from services.learner.patience import LONG_AGO_SECONDS, REISSUE_SECONDS, Patience

LIMIT = 30.0


def look(patience: Patience, start: float, seconds: float, *, possible: bool = True) -> list[int]:
    """Asks each second for so long; returns what was late."""
    found = []
    for second in range(int(seconds) + 1):
        found += patience.late(start + second, possible=possible)
    return found


def test_a_group_that_got_lost_is_late_once() -> None:
    patience = Patience(LIMIT)
    patience.late(0.0, possible=True)
    patience.issued(7, 1.0)
    assert look(patience, 1.0, LIMIT) == []
    assert look(patience, 1.0 + LIMIT, 5) == [7]
    assert look(patience, 40.0, 100) == []


def test_a_group_that_has_its_result_is_never_late() -> None:
    patience = Patience(LIMIT)
    patience.issued(7, 0.0)
    patience.done(7)
    assert look(patience, 0.0, 10 * LIMIT) == []


def test_workers_that_come_back_after_long_find_all_groups_still_wanted() -> None:
    patience = Patience(LIMIT)
    for ordinal in range(3):
        patience.issued(ordinal, 0.0)
    assert look(patience, 0.0, 20 * LIMIT, possible=False) == []
    back = 20 * LIMIT
    assert look(patience, back, LIMIT) == []
    assert look(patience, back + LIMIT, 3) == [0, 1, 2]


def test_a_learner_that_stood_still_gives_nobody_up() -> None:
    patience = Patience(LIMIT)
    patience.issued(1, 0.0)
    assert look(patience, 0.0, 10) == []
    woken = 10 + LONG_AGO_SECONDS + 1
    assert patience.late(woken, possible=True) == []
    assert look(patience, woken, LIMIT) == []


def test_lost_entries_are_looked_for_once_in_a_while_without_results() -> None:
    patience = Patience(LIMIT)
    searched = [second for second in range(400) if patience.should_search(float(second))]
    assert searched == [61, 122, 183, 244, 305, 366]
    patience.arrived(370.0)
    assert not patience.should_search(370.0 + REISSUE_SECONDS)


events = st.lists(
    st.tuples(
        st.floats(0.1, 20.0),
        st.one_of(
            st.tuples(st.just("issue"), st.integers(0, 3)),
            st.tuples(st.just("arrive"), st.integers(0, 3)),
            st.tuples(st.just("look"), st.booleans()),
        ),
    ),
    max_size=60,
)


@given(events)
def test_only_a_whole_limit_without_a_result_and_with_workers_makes_late(history) -> None:
    patience = Patience(LIMIT)
    now = 0.0
    since: dict[int, float] = {}
    counted_from = looked_at = float("-inf")
    for seconds, (what, argument) in history:
        now += seconds
        if what == "issue":
            patience.issued(argument, now)
            since[argument] = now
        elif what == "arrive":
            patience.arrived(now)
            patience.done(argument)
            since.pop(argument, None)
            counted_from = now
        else:
            if not argument or now - looked_at > LONG_AGO_SECONDS:
                counted_from = now
            looked_at = now
            expected = {o for o, at in since.items() if now - max(at, counted_from) > LIMIT}
            assert set(patience.late(now, possible=argument)) == expected
            since = {o: at for o, at in since.items() if o not in expected}
