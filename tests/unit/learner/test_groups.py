"""Which groups of a cohort a step trains, and what the rewards' components say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.v1 import samples_pb2 as samples
from services.learner.batching import Group, Sample
from services.learner.groups import component_metrics, left_out


def group(ordinal: int, rewards: list[float]) -> Group:
    ids, logprobs = np.array([3], np.int32), np.array([-1.0], np.float32)
    return Group(ordinal, ids, tuple(Sample(ids, logprobs, r, True) for r in rewards))


def test_the_first_groups_with_a_signal_are_trained() -> None:
    """Dynamic sampling: a cohort of six for a step of two."""
    rewards = [[1, 1], [0, 1], [0, 0], [1, 0], [0, 1], [1, 1]]
    groups = [group(10 + place, row) for place, row in enumerate(rewards)]
    assert left_out(groups, equal=True, at_most=2) == {10, 12, 14, 15}
    assert left_out(groups, equal=True, at_most=6) == {10, 12, 15}
    assert left_out(groups, equal=False, at_most=6) == set()


@given(st.permutations(range(5)), st.integers(1, 5))
def test_what_is_trained_does_not_depend_on_who_arrived_first(
    order: list[int], at_most: int
) -> None:
    groups = [group(place, [0.0, float(place % 2)]) for place in range(5)]
    shuffled = [groups[place] for place in order]
    assert left_out(shuffled, equal=True, at_most=at_most) == left_out(
        groups, equal=True, at_most=at_most
    )


def test_components_are_averaged_where_they_have_a_value() -> None:
    given_values = [{"exact": 1.0, "style": None}, {"exact": 0.0, "style": 0.5}]
    scores = [
        samples.CompletionScore(
            components=[samples.ScoreComponent(name=n, value=v) for n, v in values.items()]
        )
        for values in given_values
    ]
    found = component_metrics([samples.ScoredRollout(scores=scores)])
    assert found == pytest.approx({"reward_component/exact": 0.5, "reward_component/style": 0.5})
