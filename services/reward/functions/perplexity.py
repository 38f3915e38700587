"""`perplexity`: how unlikely a model finds a completion. A report for evaluations, not a reward.

Under the supervised model it tells how far a policy has drifted. Two denominators are in use. `completion` is the usual
one: the mean over the completion's tokens. `all` divides by the prompt's tokens too, as the released code of arXiv
2410.18252 does; its values lie near 1 and can't be compared with the others.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.config.base import Settings
from offbeat.errors import ModelError
from services.reward.functions.devices import find_device


class PerplexityParams(Settings):
    """Params of `perplexity`."""

    path: str = Field(description="Hugging Face folder of a causal model with the policy's tokens.")
    denominator: Literal["completion", "all"] = Field(
        "completion", description="Tokens that the negative log-likelihood is divided by."
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1 …; auto: cuda when there is one.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="In 16 bits a value depends on what it is batched with."
    )
    special_tokens: bool = Field(
        True,
        description="Let the tokenizer add its special tokens to the prompt; false where a chat template wrote them.",
    )
    max_tokens: int = Field(
        16384, gt=0, description="Largest padded number of tokens of one batch."
    )


class Perplexity:
    """exp(negative log-likelihood of the completion / number of tokens), the end-of-sequence token included."""

    def __init__(self, **params: Any) -> None:
        self._params = PerplexityParams(**params)
        self._device = find_device(self._params.device)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._params.path)
            self._model = AutoModelForCausalLM.from_pretrained(
                self._params.path, dtype=getattr(torch, self._params.dtype)
            ).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"perplexity: {self._params.path}: expected a causal language model with its tokenizer, found none "
                f"that loads: {error}"
            ) from error
        self._model.to(self._device)

    def __call__(self, prompts: list[str], completion_token_ids: list[list[int]]) -> list[float]:
        """One perplexity per completion. Raises `ValueError` for a completion without tokens."""
        prompt_ids: list[list[int]] = [
            self._tokenizer(prompt, add_special_tokens=self._params.special_tokens)["input_ids"]
            for prompt in prompts
        ]
        pairs = list(zip(prompt_ids, completion_token_ids, strict=True))
        for index, (prompt, completion) in enumerate(pairs):
            if not prompt or not completion:
                raise ValueError(
                    f"expected a prompt and completion_token_ids, found {len(prompt)} and {len(completion)} tokens "
                    f"at index {index}"
                )
        found: list[float] = []
        size = max(1, self._params.max_tokens // max(len(p) + len(c) for p, c in pairs))
        for start in range(0, len(pairs), size):
            found += self._of(pairs[start : start + size])
        return found

    @torch.inference_mode()
    def _of(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        width = max(len(prompt) + len(completion) for prompt, completion in pairs)
        ids = torch.zeros(len(pairs), width, dtype=torch.long)
        seen, counted = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, (prompt, completion) in enumerate(pairs):
            end = len(prompt) + len(completion)
            ids[row, :end] = torch.tensor([*prompt, *completion])
            seen[row, :end] = 1
            counted[row, len(prompt) : end] = 1
        ids, seen, counted = (tensor.to(self._device) for tensor in (ids, seen, counted))
        logits = self._model(input_ids=ids, attention_mask=seen).logits.float()
        total = _negative_log_likelihood(logits, ids, counted)
        tokens = (counted if self._params.denominator == "completion" else seen).sum(1)
        return [float(value) for value in torch.exp(total / tokens)]


def _negative_log_likelihood(logits: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
    """(B,) sums over the counted positions, from logits (B, T, V), ids and counted (B, T)."""
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(logprobs * counted[:, 1:]).sum(1)
