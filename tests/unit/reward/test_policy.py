"""When a worker stops on its own, and when it may send heartbeats."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.policy import StopPolicy, Watchdog

EVENTS = st.lists(
    st.one_of(st.just("scored"), st.tuples(st.sampled_from("fg"), st.integers(0, 4))), max_size=60
)


@settings(deadline=None, max_examples=50)
@given(EVENTS, st.integers(1, 4))
def test_broken_means_that_many_groups_in_a_row_by_one_function(events, limit):
    policy = StopPolicy(limit)
    run: list[tuple[str, int]] = []
    for event in events:
        if event == "scored":
            policy.scored()
            run = []
        else:
            policy.failed(*event)
            run = [e for e in run if e[0] == event[0]] + [event]
            if len({e[0] for e in run}) > 1:
                run = [event]
        broken = len({group for _, group in run}) >= limit
        assert (policy.broken_function is not None) == broken
        if broken:
            assert policy.broken_function == run[-1][0]


def test_one_group_that_fails_again_and_again_is_not_a_broken_function():
    policy = StopPolicy(2)
    for _ in range(10):
        policy.failed("f", "group 1")
    assert policy.broken_function is None


def test_heartbeats_end_without_progress_and_come_back_with_it():
    watchdog = Watchdog(10.0)
    assert watchdog.alive(1e9)
    watchdog.progress(100.0)
    assert watchdog.alive(110.0)
    assert not watchdog.alive(110.1)
    watchdog.progress(111.0)
    assert watchdog.alive(120.0)
    watchdog.idle()
    assert watchdog.alive(1e9)
