"""Draws tokens from logits, with their log-probs. Used by the transformers engine.

Shapes: B sequences, V entries of the vocabulary.
"""

from collections.abc import Sequence

import torch

from services.generator.engines.base import GenerationRequest


def draw(
    logits_BV: torch.Tensor,
    requests: Sequence[GenerationRequest],
    generators: Sequence[torch.Generator],
) -> tuple[list[int], list[float]]:
    """A token for each sequence, and its log-prob in the distribution it was drawn from.

    Each sequence has a random number generator of its own, so its tokens do not depend on the others of the batch.
    """
    logprobs_BV = torch.log_softmax(_processed(logits_BV.float(), requests), dim=-1).cpu()
    tokens, logprobs = [], []
    for logprobs_V, request, generator in zip(logprobs_BV, requests, generators, strict=True):
        if request.temperature == 0:
            token = int(logprobs_V.argmax())
        else:
            token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
        tokens.append(token)
        logprobs.append(float(logprobs_V[token]))
    return tokens, logprobs


def _processed(logits_BV: torch.Tensor, requests: Sequence[GenerationRequest]) -> torch.Tensor:
    """Logits after temperature, then min_p, top_k and top_p, in this order. Greedy rows stay as they are."""
    temperatures = [request.temperature or 1.0 for request in requests]
    logits_BV = logits_BV / logits_BV.new_tensor(temperatures).unsqueeze(-1)
    for row, request in enumerate(requests):
        if request.temperature > 0 and (
            request.min_p > 0 or request.top_k > 0 or request.top_p < 1
        ):
            logits_BV[row] = _cut(logits_BV[row], request)
    return logits_BV


def _cut(logits_V: torch.Tensor, request: GenerationRequest) -> torch.Tensor:
    if request.min_p > 0:
        probs_V = logits_V.softmax(-1)
        logits_V = logits_V.masked_fill(probs_V < request.min_p * probs_V.max(), -torch.inf)
    if request.top_k > 0:
        smallest = logits_V.topk(min(request.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < smallest, -torch.inf)
    if request.top_p < 1:
        sorted_V, order = logits_V.sort(descending=True)
        probs_V = sorted_V.softmax(-1)
        # The token that crosses the mass stays, so at least one does.
        outside = probs_V.cumsum(-1) - probs_V >= request.top_p
        logits_V = logits_V.masked_fill(
            torch.zeros_like(outside).scatter(0, order, outside), -torch.inf
        )
    return logits_V
