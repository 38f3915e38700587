"""Log-probs of completion tokens from a causal language model.

The trainer runs policy and reference through `TokenScorer`. Full-vocabulary float32 logits never
exist but for a chunk of rows: what is kept for the backward pass are the logits in the model's own
dtype.

Legend: B rows, S positions of prompt and completion, T completion positions, L positions whose
logits are kept, N = B L, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

# Logits of one chunk in float32: 64 MiB.
CHUNK_ELEMENTS = 2**24


class _TokenLogprobs(torch.autograd.Function):
    """(log-probs, entropies) of target tokens, float32, chunk by chunk; no gradient to entropies."""

    @staticmethod
    def forward(
        ctx: Any, logits_N_V: Tensor, targets_N: Tensor, temperature: float, entropies: bool
    ) -> tuple[Tensor, Tensor]:
        count, vocabulary = logits_N_V.shape
        logprobs_N = torch.empty(count, dtype=torch.float32, device=logits_N_V.device)
        entropies_N, normaliser_N = torch.zeros_like(logprobs_N), torch.empty_like(logprobs_N)
        for rows in _chunks(count, vocabulary):
            scaled = _scaled(logits_N_V[rows], temperature)
            normaliser = torch.logsumexp(scaled, dim=-1)
            picked = scaled.gather(-1, targets_N[rows, None])[:, 0]
            logprobs_N[rows] = picked - normaliser
            normaliser_N[rows] = normaliser
            if entropies:
                # In place from here on: at this size memory is what takes the time.
                weighted = (scaled - normaliser[:, None]).exp_().mul_(scaled)
                entropies_N[rows] = normaliser - weighted.sum(dim=-1)
        ctx.save_for_backward(logits_N_V, targets_N, normaliser_N)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits_N_V, targets_N, normaliser_N = ctx.saved_tensors
        scale_N = gradients[0] / ctx.temperature
        result = torch.empty_like(logits_N_V)
        for rows in _chunks(*logits_N_V.shape):
            scaled = _scaled(logits_N_V[rows], ctx.temperature)
            gradient = (scaled - normaliser_N[rows, None]).exp_().mul_(-scale_N[rows, None])
            gradient.scatter_add_(-1, targets_N[rows, None], scale_N[rows, None])
            result[rows] = gradient
        return result, None, None, None


def _scaled(logits_N_V: Tensor, temperature: float) -> Tensor:
    """In float32; the logits themselves where nothing has to be done to them."""
    scaled = logits_N_V.float()
    return scaled if temperature == 1 else scaled / temperature


def _chunks(count: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, start + size) for start in range(0, count, size)]


def token_logprobs(
    logits_N_V: Tensor, targets_N: Tensor, temperature: float, *, entropies: bool = True
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets, and the entropies, both (N,) float32.

    Without `entropies`, which take about as long as the log-probs, there are zeros in their place.
    """
    logprobs_N, entropies_N = _TokenLogprobs.apply(logits_N_V, targets_N, temperature, entropies)
    return logprobs_N, entropies_N


class TokenScorer(nn.Module):
    """A causal language model that returns the log-probs of completion tokens.

    Rows are prompt and completion, right-padded. Neither an attention mask nor positions are
    passed: with causal attention no token sees the padding on its right, and the default positions
    0, 1, ... are right.
    """

    def __init__(self, model: nn.Module, *, value_head: bool = False) -> None:
        super().__init__()
        self.model = model
        self.value_head: nn.Linear | None = None
        if value_head:
            self._add_value_head()
        self._cuts_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(
        self,
        tokens_B_S: Tensor,
        prompt_B: Tensor,
        completion_B: Tensor,
        first: int,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        """(log-probs, entropies), both (B, T) float32, 0 at padding; with a value head values as well.

        Entropies are computed for passes with gradient only, which are those that anybody asks; else they are 0.
        `prompt_B`, `completion_B`: lengths, int64; `first`: the shortest prompt's length.
        """
        # The logits at position i are about token i + 1.
        positions_L = torch.arange(first - 1, tokens_B_S.shape[1] - 1, device=tokens_B_S.device)
        if self._cuts_logits:
            kept = {"logits_to_keep": positions_L}
            logits_B_L_V = self.model(input_ids=tokens_B_S, use_cache=False, **kept).logits
        else:
            logits_B_L_V = self.model(input_ids=tokens_B_S, use_cache=False).logits[:, positions_L]
        logprobs_N, entropies_N = token_logprobs(
            logits_B_L_V.flatten(0, 1),
            tokens_B_S[:, first:].reshape(-1),
            temperature,
            entropies=torch.is_grad_enabled(),
        )
        shape = (len(tokens_B_S), len(positions_L))
        outputs = [logprobs_N.view(shape), entropies_N.view(shape)]
        if self.value_head is not None:
            hidden = self._hidden.pop()
            hidden = hidden if self._cuts_logits else hidden[:, positions_L]
            outputs.append(self.value_head(hidden)[..., 0].float())
        return tuple(completions(part, prompt_B - first, completion_B) for part in outputs)

    def _add_value_head(self) -> None:
        """A linear head, 0 at first, on what the output layer is given. It is no part of the model."""
        output = self.model.get_output_embeddings()
        size = self.model.config.get_text_config().hidden_size
        weight = next(self.model.parameters())
        self.value_head = nn.Linear(size, 1, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.value_head.weight)
        self._hidden: list[Tensor] = []

        def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            self._hidden[:] = [given[0]]

        output.register_forward_pre_hook(keep)


def completions(values_B_L: Tensor, start_B: Tensor, length_B: Tensor) -> Tensor:
    """Moves each row's completion to the left edge: (B, L) -> (B, T)."""
    steps_T = torch.arange(int(length_B.max()), device=values_B_L.device)
    index_B_T = (start_B[:, None] + steps_T).clamp(max=values_B_L.shape[1] - 1)
    return torch.where(steps_T < length_B[:, None], values_B_L.gather(1, index_B_T), 0.0)
