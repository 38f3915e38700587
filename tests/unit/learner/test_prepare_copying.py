"""Sequences that repeat themselves: their shape, and what is counted as copied."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.learner.prepare.copying import CopyingSettings, accuracy, repeated_sequences


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 12),
    batch=st.integers(1, 4),
    length=st.integers(8, 40),
    least=st.integers(2, 7),
    more=st.integers(0, 40),
    tokens=st.integers(1, 200),
)
def test_all_but_the_first_period_can_be_copied(seed, steps, batch, length, least, more, tokens):
    settings = CopyingSettings(
        steps=steps, batch=batch, length=length, periods=(least, min(least + more, length - 1))
    )
    rows = list(repeated_sequences(settings, range(10, 10 + tokens), seed))
    assert rows == list(repeated_sequences(settings, range(10, 10 + tokens), seed))
    assert len(rows) == steps * batch
    for place, (ids, period) in enumerate(rows):
        assert len(ids) == length
        assert settings.periods[0] <= period <= settings.periods[1]
        assert ids[period:] == ids[:-period]
        assert set(ids) <= set(range(10, 10 + tokens))
        assert period == rows[place - place % batch][1]


def test_few_tokens_at_first_and_all_in_the_end():
    settings = CopyingSettings(steps=100, batch=32)
    rows = [set(ids) for ids, _ in repeated_sequences(settings, range(1000), 0)]
    assert len(set().union(*rows[: 10 * 32])) < 300
    assert len(set().union(*rows[-10 * 32 :])) > 900


@pytest.mark.parametrize("periods", [(1, 4), (5, 4), (4, 48)])
def test_periods_that_do_not_repeat_are_refused(periods):
    with pytest.raises(ValidationError, match="least ≤ greatest < length"):
        CopyingSettings(periods=periods)


class Copier(torch.nn.Module):
    """Foresees that the token `period` places ago comes again; of no other period does it know."""

    def __init__(self, period: int, vocabulary: int) -> None:
        super().__init__()
        self.period, self.vocabulary = period, vocabulary

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        foreseen = input_ids.roll(self.period - 1, dims=1)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(foreseen, self.vocabulary))


def test_accuracy_is_the_share_of_the_repeated_tokens_that_are_foreseen():
    settings = CopyingSettings(batch=4, length=32, periods=(4, 5))
    tokens = range(1000)
    # The period 4 has 3 tokens that are counted in each sequence, the period 5 has 4.
    found = accuracy(settings, Copier(4, 1000), tokens, seed=0)
    assert found == pytest.approx(3 / 7, abs=0.04)
    only = CopyingSettings(batch=4, length=32, periods=(4, 4))
    assert accuracy(only, Copier(4, 1000), tokens, seed=0) == 1.0
