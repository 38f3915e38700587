"""The restart policy: back-off, the end of patience, and what is forgiven."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.local.restarts import RestartPolicy


def test_delays_double_up_to_the_largest() -> None:
    policy = RestartPolicy(max_quick=8, first_delay=0.5, max_delay=4.0)
    assert [policy.ended(1.0, crashed=True) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_the_last_quick_crash_is_one_too_many() -> None:
    policy = RestartPolicy(max_quick=3)
    assert policy.ended(1.0, crashed=True) is not None
    assert policy.ended(59.9, crashed=True) is not None
    assert policy.ended(0.0, crashed=True) is None


def test_a_long_life_forgives() -> None:
    policy = RestartPolicy(max_quick=3, first_delay=0.5, quick_seconds=60)
    policy.ended(1.0, crashed=True)
    policy.ended(1.0, crashed=True)
    assert policy.ended(60.0, crashed=True) == 0.5
    assert policy.quick_in_a_row == 0


@given(st.lists(st.floats(0, 1000), max_size=50))
def test_clean_ends_are_never_too_many(lives: list[float]) -> None:
    policy = RestartPolicy(max_quick=2)
    assert all(policy.ended(lived, crashed=False) == policy.clean_delay for lived in lives)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_it_gives_up_exactly_after_max_quick_in_a_row(lives: list[float], limit: int) -> None:
    policy = RestartPolicy(max_quick=limit)
    in_a_row = 0
    for lived in lives:
        delay = policy.ended(lived, crashed=True)
        in_a_row = in_a_row + 1 if lived < policy.quick_seconds else 0
        assert (delay is None) == (in_a_row >= limit)
        if delay is None:
            return
        assert policy.first_delay <= delay <= policy.max_delay
