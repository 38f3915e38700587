"""Perplexities are those of a slow calculation, token by token, with either denominator."""

import math

import pytest

from offbeat.errors import ModelError

torch = pytest.importorskip("torch")

from services.reward.functions.perplexity import Perplexity  # noqa: E402
from tests.harness.tiny_models import make_tiny_model  # noqa: E402

PROMPTS = ["abc", "hello world", "x"]
COMPLETIONS = [[70, 80, 2], [90], [5, 6, 7, 8, 9, 10, 11, 12]]


@pytest.fixture(scope="module")
def model_and_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perplexity") / "model"
    model = make_tiny_model(folder, tied=False)
    model.save_pretrained(folder)
    return model, folder


def _slow(model, prompt_ids, completion_ids, denominator):
    """One forward pass per token: no batch, no padding, no shifting."""
    total = 0.0
    for place, token in enumerate(completion_ids):
        seen = torch.tensor([[*prompt_ids, *completion_ids[:place]]])
        with torch.inference_mode():
            logits = model(input_ids=seen).logits[0, -1].double()
        total -= math.log(float(torch.softmax(logits, -1)[token]))
    tokens = len(completion_ids) + (len(prompt_ids) if denominator == "all" else 0)
    return math.exp(total / tokens)


@pytest.mark.parametrize("denominator", ["completion", "all"])
@pytest.mark.parametrize("max_tokens", [1, 30, 4096])
def test_both_denominators(model_and_folder, denominator, max_tokens):
    model, folder = model_and_folder
    function = Perplexity(path=str(folder), denominator=denominator, max_tokens=max_tokens)
    prompt_ids = [[ord(c) - ord("a") + 3 if c != " " else 0 for c in text] for text in PROMPTS]
    expected = [
        _slow(model, p, c, denominator) for p, c in zip(prompt_ids, COMPLETIONS, strict=True)
    ]
    found = function(prompts=PROMPTS, completion_token_ids=COMPLETIONS)
    assert found == pytest.approx(expected, rel=1e-4)
    assert len({round(value, 2) for value in found}) == 3


def test_a_completion_without_tokens_is_an_error(model_and_folder):
    function = Perplexity(path=str(model_and_folder[1]))
    with pytest.raises(ValueError, match="1 and 0 tokens at index 1"):
        function(prompts=["a", "b"], completion_token_ids=[[5], []])


def test_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="causal language model"):
        Perplexity(path=str(tmp_path))
