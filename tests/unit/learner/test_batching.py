"""Mini-batches, shares and micro-batches lose nothing, double nothing, and keep units whole."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import DataError
from services.learner.batching import (
    Group,
    Sample,
    StepBatch,
    check_groups,
    fits,
    mini_batches,
    pack,
    rows_in,
    shares,
    unpack,
)

# A busy machine is no failure.
relaxed = settings(deadline=None, max_examples=50)


@st.composite
def steps(draw: st.DrawFn) -> list[Group]:
    """Groups of any sizes and lengths, in any order of ordinals."""
    count = draw(st.integers(0, 6))
    ordinals = draw(st.permutations(range(count)))
    return [draw(groups(ordinal)) for ordinal in ordinals]


@st.composite
def groups(draw: st.DrawFn, ordinal: int) -> Group:
    prompt = np.arange(draw(st.integers(1, 6)), dtype=np.int32)
    samples = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 9))
        generator = np.random.default_rng(draw(st.integers(0, 1000)))
        samples.append(
            Sample(
                token_ids=generator.integers(0, 99, length).astype(np.int32),
                behaviour_logprobs=-generator.random(length).astype(np.float32),
                reward=draw(st.sampled_from([0.0, 0.5, 1.0])),
                has_eos=draw(st.booleans()),
                lag=draw(st.integers(0, 3)),
                loss_mask=generator.random(length) < 0.5 if draw(st.booleans()) else None,
                reference_logprobs=-generator.random(length).astype(np.float32)
                if draw(st.booleans())
                else None,
            )
        )
    return Group(ordinal, prompt, tuple(samples))


def whole_group(rewards: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(range(len(rewards)))]


def assert_equal(left: Group, right: Group) -> None:
    assert left.ordinal == right.ordinal
    np.testing.assert_array_equal(left.prompt_token_ids, right.prompt_token_ids)
    for a, b in zip(left.completions, right.completions, strict=True):
        assert (a.reward, a.has_eos, a.lag) == (b.reward, b.has_eos, b.lag)
        for name in ("token_ids", "behaviour_logprobs", "loss_mask", "reference_logprobs"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None)
            if x is not None:
                np.testing.assert_array_equal(x, y)


@relaxed
@given(steps())
def test_packing_is_lossless(groups: list[Group]) -> None:
    unpacked = unpack(pack(groups))
    assert len(unpacked) == len(groups)
    for left, right in zip(groups, unpacked, strict=True):
        assert_equal(left, right)


@relaxed
@given(st.integers(0, 50), st.integers(1, 12))
def test_mini_batches_are_contiguous_and_even(count: int, parts: int) -> None:
    cut = mini_batches(count, parts)
    assert len(cut) == parts
    assert [place for part in cut for place in part] == list(range(count))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@relaxed
@given(steps(), st.integers(1, 4), st.integers(1, 120), st.booleans())
def test_shares_hold_every_unit_once_and_whole(
    groups: list[Group], world: int, max_tokens: int, bucket: bool
) -> None:
    batch = StepBatch(groups, whole_group)
    units = [unit for units in batch.units for unit in units]
    lengths = batch.total_lengths
    plan = shares(units, lengths, world=world, max_tokens=max_tokens, bucket=bucket)
    assert len(plan) == world
    assert len({len(share) for share in plan}) == 1, "all ranks must run as many micro-batches"
    assert len(plan[0]) >= 1
    dealt = [unit for share in plan for micro_batch in share for unit in micro_batch]
    assert Counter(dealt) == Counter(units)
    for share in plan:
        for micro_batch in filter(None, share):
            rows = rows_in(micro_batch)
            padded = len(rows) * int(lengths[rows].max())
            assert padded <= max_tokens or len(micro_batch) == 1
            assert padded <= max_tokens or not fits(micro_batch, lengths, max_tokens)


@relaxed
@given(steps(), st.integers(1, 4), st.booleans())
def test_shares_are_even(groups: list[Group], world: int, bucket: bool) -> None:
    batch = StepBatch(groups, lambda rewards: [(k,) for k in range(len(rewards))])
    units = [unit for units in batch.units for unit in units]
    plan = shares(units, batch.total_lengths, world=world, max_tokens=10**6, bucket=bucket)
    counts = [len(rows_in([u for m in share for u in m])) for share in plan]
    assert max(counts) - min(counts) <= 1


@relaxed
@given(steps())
def test_rows_stand_in_ordinal_order_with_their_own_values(groups: list[Group]) -> None:
    batch = StepBatch(groups, whole_group)
    assert [group.ordinal for group in batch.groups] == sorted(g.ordinal for g in groups)
    for place, group in enumerate(batch.groups):
        rows = batch.rows_of(place)
        assert batch.units[place] == [tuple(rows)]
        for row, sample in zip(rows, group.completions, strict=True):
            index = batch.flat_index([row])
            np.testing.assert_array_equal(batch.behaviour[index], sample.behaviour_logprobs)
            assert batch.rewards[row] == sample.reward
            expected = sample.behaviour_logprobs.astype(np.float64)
            if sample.loss_mask is not None:
                expected = expected[sample.loss_mask]
            np.testing.assert_allclose(batch.row_sums(batch.behaviour)[row], expected.sum())
    assert batch.tokens_of(range(len(groups))) == batch.mask.sum()


@relaxed
@given(steps().filter(len))
def test_collated_rows_hold_prompt_completion_and_padding(groups: list[Group]) -> None:
    batch = StepBatch(groups, whole_group)
    rows = list(reversed(range(len(batch.samples))))
    tokens, prompts, completions, first = batch.collate(rows)
    padded = batch.padded(batch.behaviour, rows)
    prompt_of = [g.prompt_token_ids for g in batch.groups for _ in g.completions]
    for line, row in enumerate(rows):
        sample, prompt = batch.samples[row], prompt_of[row]
        assert (int(prompts[line]), int(completions[line])) == (len(prompt), len(sample.token_ids))
        end = len(prompt) + len(sample.token_ids)
        assert tokens[line, :end].tolist() == [*prompt.tolist(), *sample.token_ids.tolist()]
        assert (tokens[line, end:] == 0).all()
        length = len(sample.token_ids)
        np.testing.assert_array_equal(padded[line, :length].numpy(), sample.behaviour_logprobs)
        assert (padded[line, length:] == 0).all()
    assert first == min(len(prompt) for prompt in prompt_of)


def sample(**changes: object) -> Sample:
    values: dict[str, object] = {
        "token_ids": np.array([3, 4], np.int32),
        "behaviour_logprobs": np.array([-1.0, -2.0], np.float32),
        "reward": 1.0,
        "has_eos": True,
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"token_ids": np.zeros(0, np.int32)}, "at least one token"),
        ({"behaviour_logprobs": np.zeros(3, np.float32)}, "2 finite behaviour_logprobs"),
        ({"behaviour_logprobs": np.array([0, np.nan], np.float32)}, "finite behaviour_logprobs"),
        ({"reward": float("nan")}, "finite reward"),
        ({"loss_mask": np.ones(1, np.bool_)}, "loss_mask"),
    ],
)
def test_a_sample_that_can_not_be_trained_on_is_named(
    changes: dict[str, object], found: str
) -> None:
    group = Group(17, np.array([5], np.int32), (sample(), sample(**changes)))
    with pytest.raises(DataError, match=f"ordinal 17, completion 1.*{found}"):
        check_groups([group], max_context=8)


def test_a_group_longer_than_the_context_is_named() -> None:
    group = Group(2, np.arange(7, dtype=np.int32), (sample(),))
    with pytest.raises(DataError, match=r"ordinal 2.*9 tokens.*max_context is 8"):
        check_groups([group], max_context=8)
