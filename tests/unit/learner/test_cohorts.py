"""Admission and gathering: the bound on staleness holds for every order of events."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import OffbeatError
from offbeat.streams.base import Delivery, Stream
from offbeat.v1 import samples_pb2 as samples
from services.learner.cohorts import Cohorts, LagExceeded, Verdict


def delivery(ordinal: int, *versions: int) -> Delivery:
    """A scored group with one completion whose tokens come from `versions`."""
    spans = [samples.VersionSpan(version=version, count=1) for version in versions]
    completion = samples.Completion(token_ids=[1] * len(versions), version_spans=spans)
    task = samples.PromptTask(ordinal=ordinal, kind=samples.TASK_KIND_TRAIN, k=1)
    record = samples.ScoredRollout(rollout=samples.Rollout(task=task, completions=[completion]))
    return Delivery(Stream.SCORED, f"0-{ordinal}", record)


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 4),
    max_lag=st.integers(0, 5),
    total=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_no_sample_is_older_than_max_lag_and_every_ordinal_is_trained_once(
    size, max_lag, total, seed
):
    """Random speeds and orders of generation; generators always use the newest version that they know of."""
    order = random.Random(seed)
    cohorts = Cohorts(prompts_per_step=size, max_lag=max_lag, total_steps=total)
    cohorts.lineage.add(1, 0, 0)
    waiting: list[tuple[int, int]] = []
    trained: list[int] = []
    lags: list[int] = []
    version, known = 1, 1
    while cohorts.next_step < total:
        waiting += [
            (o, cohorts.min_version(c)) for c in cohorts.admit() for o in cohorts.ordinals(c)
        ]
        if not cohorts.complete():
            ordinal, min_version = waiting.pop(order.randrange(len(waiting)))
            known = max(known, min_version, order.randint(known, version))
            assert cohorts.add_group(delivery(ordinal, known)) is Verdict.ACCEPTED
            continue
        step = cohorts.next_step
        for ordinal, place in cohorts.pop():
            trained.append(ordinal)
            lags.append(cohorts.lag(step, place.group.rollout.completions))
        version += 1
        cohorts.lineage.add(version, step + 1, step + 1)
    assert trained == list(range(size * total))
    assert all(0 <= lag <= max_lag for lag in lags)


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_a_fast_generator_runs_exactly_max_lag_ahead(max_lag):
    """All groups are generated as soon as they are issued: after the first steps each has lag = max_lag."""
    cohorts = Cohorts(prompts_per_step=2, max_lag=max_lag, total_steps=12)
    lags = []
    for step in range(12):
        cohorts.lineage.add(step + 1, step, step)
        for cohort in cohorts.admit():
            for ordinal in cohorts.ordinals(cohort):
                cohorts.add_group(delivery(ordinal, step + 1))
        lags += [cohorts.lag(step, place.group.rollout.completions) for _, place in cohorts.pop()]
    assert lags[2 * max_lag :] == [max_lag] * (24 - 2 * max_lag)
    assert max(lags) == max_lag


def test_lag_counts_from_the_oldest_token():
    cohorts = Cohorts(prompts_per_step=1, max_lag=2, total_steps=3)
    for version in (1, 2, 3):
        cohorts.lineage.add(version, version - 1, version - 1)
    cohorts.admit()
    mixed = delivery(0, 3, 1, 2)
    assert cohorts.lag(2, mixed.record.rollout.completions) == 2


def test_the_first_result_wins():
    cohorts = Cohorts(prompts_per_step=1, max_lag=0, total_steps=2)
    cohorts.lineage.add(1, 0, 0)
    cohorts.admit()
    assert cohorts.add_group(delivery(0, 1)) is Verdict.ACCEPTED
    assert cohorts.add_group(delivery(0, 1)) is Verdict.DUPLICATE
    assert cohorts.add_dead(0, "late") is Verdict.DUPLICATE
    cohorts.pop()
    assert cohorts.add_group(delivery(0, 1)) is Verdict.DUPLICATE
    assert cohorts.add_group(delivery(1, 1)) is Verdict.DUPLICATE, "not issued yet"


def test_a_token_of_an_abandoned_version_is_refused():
    cohorts = Cohorts(prompts_per_step=1, max_lag=2, total_steps=5, first_step=2)
    cohorts.lineage.versions.update({1: (0, 0), 2: (1, 1), 3: (2, 2)})
    cohorts.lineage.add(7, 2, 2)  # 4, 5, 6 were published by the learner that died
    assert cohorts.admit() == [2, 3, 4]
    assert cohorts.add_group(delivery(2, 3, 5)) is Verdict.ABANDONED
    assert cohorts.missing() == [2, 3, 4]
    assert cohorts.next_attempt(2, seen=3) == 4
    assert cohorts.add_group(delivery(2, 3, 7)) is Verdict.ACCEPTED


def test_a_dead_place_completes_its_cohort():
    cohorts = Cohorts(prompts_per_step=2, max_lag=0, total_steps=1)
    cohorts.lineage.add(1, 0, 0)
    cohorts.admit()
    cohorts.add_group(delivery(1, 1))
    assert not cohorts.complete()
    cohorts.add_dead(0, "too long")
    assert [place.dead for _, place in cohorts.pop()] == ["too long", None]


def test_version_numbers_must_grow():
    cohorts = Cohorts(prompts_per_step=1, max_lag=0, total_steps=1)
    cohorts.lineage.add(4, 0, 0)
    with pytest.raises(OffbeatError, match="must grow"):
        cohorts.lineage.add(4, 1, 1)


def test_a_sample_beyond_the_bound_is_an_error_not_a_statistic():
    cohorts = Cohorts(prompts_per_step=1, max_lag=0, total_steps=2)
    cohorts.lineage.add(1, 0, 0)
    cohorts.admit()
    cohorts.add_group(delivery(0, 1))
    cohorts.pop()
    cohorts.lineage.add(2, 1, 1)
    cohorts.admit()
    cohorts.add_group(delivery(1, 1))
    with pytest.raises(LagExceeded, match="lag 1, expected 0"):
        cohorts.pop()


def test_a_sample_that_a_larger_bound_allowed_is_generated_again():
    """The run was resumed with a smaller max_lag."""
    cohorts = Cohorts(prompts_per_step=1, max_lag=0, total_steps=5, first_step=3)
    cohorts.lineage.versions.update({1: (0, 0), 2: (1, 1), 3: (2, 2), 4: (3, 3)})
    cohorts.lineage.add(5, 3, 3)
    assert cohorts.admit() == [3]
    cohorts.inherit(3, 0)
    assert cohorts.add_group(delivery(3, 2)) is Verdict.TOO_OLD
    assert cohorts.add_group(delivery(3, 5)) is Verdict.ACCEPTED


def test_the_death_of_an_older_attempt_says_nothing():
    cohorts = Cohorts(prompts_per_step=1, max_lag=0, total_steps=1)
    cohorts.lineage.add(1, 0, 0)
    cohorts.admit()
    cohorts.next_attempt(0)
    assert cohorts.add_dead(0, "old", attempt=0) is Verdict.DUPLICATE
    assert cohorts.add_dead(0, "new", attempt=1) is Verdict.ACCEPTED


def test_after_a_resume_tasks_need_the_newest_twin_of_a_version():
    cohorts = Cohorts(prompts_per_step=1, max_lag=1, total_steps=5, first_step=2)
    cohorts.lineage.versions.update({1: (0, 0), 2: (1, 1), 3: (2, 2)})
    cohorts.lineage.add(9, 2, 2)
    assert [cohorts.min_version(cohort) for cohort in cohorts.admit()] == [9, 9]
