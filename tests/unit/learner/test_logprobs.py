"""Log-probs by chunks against plain log-softmax, and the alignment of tokens with their logits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from services.learner import logprobs
from services.learner.logprobs import TokenScorer, token_logprobs


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("chunk", [1, 20, 10**6])
def test_chunks_equal_log_softmax(
    chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = (3 * torch.randn(13, 7)).requires_grad_()
    targets = torch.randint(0, 7, (13,))
    weights = torch.randn(13)
    found, entropies = token_logprobs(logits, targets, temperature)
    (found * weights).sum().backward()
    gradient, logits.grad = logits.grad, None
    expected = torch.log_softmax(logits / temperature, dim=-1)
    picked = expected.gather(-1, targets[:, None])[:, 0]
    (picked * weights).sum().backward()
    torch.testing.assert_close(found, picked)
    torch.testing.assert_close(gradient, logits.grad)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(-1))


def test_logits_of_low_precision_give_float32_logprobs_and_their_own_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 11, dtype=torch.bfloat16, requires_grad=True)
    found, entropies = token_logprobs(logits, torch.randint(0, 11, (5,)), 1.0)
    found.sum().backward()
    assert found.dtype == entropies.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


class NextTokenIsPosition(nn.Module):
    """A model whose logits say where they stand: at position i, token i + 1 has log-prob ~0."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        count, width = input_ids.shape
        logits = torch.zeros(count, width, 64)
        logits[:, range(width), range(1, width + 1)] = 50.0
        return SimpleNamespace(logits=logits)


def test_each_token_is_scored_by_the_logits_before_it() -> None:
    tokens = torch.tensor([[0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 4, 5], [0, 1, 9, 3, 0, 0]])
    prompts, completions = torch.tensor([3, 1, 2]), torch.tensor([1, 5, 2])
    found, _ = TokenScorer(NextTokenIsPosition())(tokens, prompts, completions, 1, 1.0)
    expected = torch.zeros(3, 5)
    expected[2, 0] = -50.0
    torch.testing.assert_close(found, expected)


class EqualLogits(nn.Module):
    """A model that knows nothing: all of 8 tokens are equally likely."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.ones(*input_ids.shape, 8))


def test_entropies_are_computed_where_there_is_a_gradient_only() -> None:
    tokens, one = torch.tensor([[0, 1, 2, 3]]), torch.tensor([1])
    scorer = TokenScorer(EqualLogits())
    with torch.no_grad():
        found, entropies = scorer(tokens, one, 3 * one, 1, 1.0)
    assert entropies.tolist() == [[0.0, 0.0, 0.0]]
    with_gradient, entropies = scorer(tokens, one, 3 * one, 1, 1.0)
    torch.testing.assert_close(entropies, torch.full((1, 3), 8.0).log())
    torch.testing.assert_close(found, with_gradient)
