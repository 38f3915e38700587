"""The batch of running sequences of the transformers engine, and one step of the model over it.

Blocking code, called from one thread. Sequences are padded on the left. Shapes: B sequences, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from services.generator.engines.base import GeneratedCompletion, GenerationRequest
from services.generator.engines.sampling import draw


@dataclass
class RunningSequence:
    """A request under way and what was sampled for it so far."""

    request: GenerationRequest
    max_tokens: int
    generator: torch.Generator = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_string: str = ""
    text: str = ""
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.request.seed)

    @property
    def ended(self) -> bool:
        """Whether it takes no further part in the batch."""
        return self.cancelled or self.finish_reason is not None

    @property
    def all_tokens(self) -> list[int]:
        """Prompt and completion."""
        return [*self.request.prompt_token_ids, *self.token_ids]

    def append(self, token: int, logprob: float, version: int) -> None:
        """Adds a sampled token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + 1)
        else:
            self.spans.append((version, 1))

    def check_end(self, eos: frozenset[int], decode: Callable[[list[int]], str]) -> None:
        """Sets finish reason, stop string and text once the last token ended it."""
        if self.request.stop:
            text = decode(self.token_ids)
            found = [
                (text.find(stop) + len(stop), stop) for stop in self.request.stop if stop in text
            ]
            if found:
                end, self.stop_string = min(found)
                self.finish_reason, self.text = "stop", text[:end]
                return
        if self.token_ids[-1] in eos and not self.request.ignore_eos:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.text = decode(self.token_ids)

    def completion(self) -> GeneratedCompletion:
        """The result; only of a sequence that has ended by itself."""
        assert self.finish_reason is not None
        return GeneratedCompletion(
            self.token_ids,
            self.logprobs,
            self.spans,
            self.finish_reason,
            self.stop_string,
            self.text,
        )


class DecodeBatch:
    """Running sequences and their KV cache."""

    def __init__(
        self, model: Any, *, eos: frozenset[int], decode: Callable[[list[int]], str]
    ) -> None:
        self._model = model
        self._eos = eos
        self._decode = decode
        self._cache: Any = None
        self._mask: torch.Tensor | None = None
        self.rows: list[RunningSequence] = []

    def forget_cache(self) -> None:
        """The next step computes keys and values of all sequences anew."""
        self._cache = self._mask = None

    def join(self, sequences: Sequence[RunningSequence]) -> None:
        """Adds sequences. Costs a pass over everything that runs, so join several at once."""
        if sequences:
            self.rows.extend(sequences)
            self.forget_cache()

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Samples one token for each sequence; ended ones leave the batch before it."""
        self._drop_ended()
        if not self.rows:
            return
        logits = self._forward()
        requests = [row.request for row in self.rows]
        tokens, logprobs = draw(logits, requests, [row.generator for row in self.rows])
        for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
            row.append(token, logprob, version)
            row.check_end(self._eos, self._decode)

    def _drop_ended(self) -> None:
        keep = [index for index, row in enumerate(self.rows) if not row.ended]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in keep]
        if not keep:
            self.forget_cache()
        elif self._cache is not None and self._mask is not None:
            indices = torch.tensor(keep, device=self._mask.device)
            self._cache.batch_select_indices(indices)
            self._mask = self._mask[indices]

    def _forward(self) -> torch.Tensor:
        """Logits of each sequence's next token."""
        if self._cache is None:
            tokens, self._mask = pad_left([row.all_tokens for row in self.rows], self._model.device)
            positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        else:
            assert self._mask is not None
            last = [[row.token_ids[-1]] for row in self.rows]
            tokens = torch.tensor(last, device=self._model.device)
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(last), 1)], dim=-1)
            positions = self._mask.sum(-1, keepdim=True) - 1
        output = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        return output.logits[:, -1]


def pad_left(sequences: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both [B, T]."""
    longest = max(map(len, sequences))
    tokens = [[0] * (longest - len(sequence)) + list(sequence) for sequence in sequences]
    mask = [[0] * (longest - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)
