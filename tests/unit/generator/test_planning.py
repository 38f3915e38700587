"""When a generator may swap its weights, and when it counts as alive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.generator.planning import Range, Watchdog, may_swap, version_for_late

versions = st.integers(1, 9)
ranges = st.builds(
    lambda oldest, extra, bounded, evaluation: Range(
        oldest, oldest + extra if bounded else 0, evaluation
    ),
    versions,
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)


@given(versions, st.lists(ranges))
def test_a_swap_never_takes_a_training_group_out_of_its_range(
    version: int, running: list[Range]
) -> None:
    training = [group for group in running if not group.evaluation]
    for patient in (True, False):
        allowed = may_swap(version, running, evaluations_may_hold=patient)
        assert not allowed or all(version in group for group in training)
    assert may_swap(version, running, evaluations_may_hold=True) == all(
        version in g for g in running
    )


@given(st.lists(ranges, min_size=1), versions)
def test_the_version_for_late_groups_suits_one_of_them_and_makes_none_newer(
    groups: list[Range], held: int
) -> None:
    late = [group for group in groups if group.is_late(held)]
    version = version_for_late(late)
    assert version < held or not late
    assert any(version in group for group in late) or not late
    assert version_for_late([]) == 0


def test_no_progress_is_seen_at_the_next_look_and_a_stall_after_its_time() -> None:
    dog = Watchdog(stall_seconds=10)
    assert dog.look(0, progress=5, busy=True)
    assert not dog.look(1, progress=5, busy=True)
    assert not dog.stalled(10)
    assert dog.stalled(11)
    assert not dog.stalled(11, times=2)
    assert dog.look(12, progress=6, busy=True)
    assert not dog.stalled(21)


def test_nothing_to_do_is_no_stall() -> None:
    dog = Watchdog(stall_seconds=10)
    for now in range(0, 100, 5):
        assert dog.look(now, progress=3, busy=False)
        assert not dog.stalled(now)
    assert not dog.look(101, progress=3, busy=True)
    assert not dog.stalled(104)
