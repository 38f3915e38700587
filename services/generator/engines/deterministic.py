"""An engine without a model, for fault tests: its tokens are hashes.

A token depends on the weights, the task's ordinal, the completion's seed and its place, and on nothing else: not on the
attempt, the time, or what else is running. So two runs can be compared bit for bit, whatever was killed in one of them.
The weights count with every byte that was loaded, so that torn ones would show in the tokens. Sampling settings other
than `max_tokens` and `ignore_eos` mean nothing to it.
"""

import asyncio
import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import DeterministicEngine
from offbeat.errors import ConfigError
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.hashing import hash_of
from offbeat.weights.manifest import weights_digest
from offbeat.weights.staged import StagedWeights
from services.generator.engines import model_folder
from services.generator.engines.base import Engine, GeneratedCompletion, GenerationRequest

CUT_SHORT_ONE_IN = 8
"""How many completions there are for one that runs into `max_tokens`."""


def _fraction(*parts: object) -> float:
    """A number in [0, 1) that is a function of the parts."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little") / 2**48


class DeterministicHashEngine(Engine):
    """Makes up tokens, at `token_seconds` each."""

    computes_policy: ClassVar[bool] = False

    def __init__(self, settings: DeterministicEngine, model: ModelSettings) -> None:
        super().__init__(slots=settings.max_num_seqs, max_context=model.max_context)
        self._settings = settings
        self._folder = Path(model.path)
        self._digest = ""
        self._tokens_made = 0
        self._vocabulary: list[int] = []
        self._eos = 0
        self._tokenizer: Any = None

    async def start(self) -> None:
        config = model_folder.read_config(self._folder)
        eos = config.get("eos_token_id")
        self._eos = model_folder.check_eos(eos[0] if isinstance(eos, list) else eos, self._folder)
        special = {config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}
        self._vocabulary = [
            i for i in range(config["vocab_size"]) if i not in special and i != self._eos
        ]
        if not self._vocabulary:
            raise ConfigError(
                f"model.path {self._folder}: vocab_size leaves no token that is not special"
            )
        if (self._folder / "tokenizer.json").exists():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))

    async def stop(self) -> None:
        """Nothing was started."""

    def progress(self) -> int:
        return self._tokens_made

    async def score_tokens(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [
            [self._logprob(self._digest, token, place) for place, token in enumerate(tokens[1:])]
            for tokens in sequences
        ]

    async def _generate(self, request: GenerationRequest, max_tokens: int) -> GeneratedCompletion:
        length, ends = self._plan(request, max_tokens)
        token_ids: list[int] = []
        logprobs: list[float] = []
        spans: list[tuple[int, int]] = []
        while len(token_ids) < length:
            await asyncio.sleep(self._settings.token_seconds)
            # While a swap is under way no version is held; like a model, it makes no token then.
            while self._version is None:
                await asyncio.sleep(0.001)
            place = len(token_ids)
            last = ends and place == length - 1
            token_ids.append(self._eos if last else self._token(request, place))
            logprobs.append(self._logprob(self._digest, request.ordinal, request.seed, place))
            if spans and spans[-1][0] == self._version:
                spans[-1] = (self._version, spans[-1][1] + 1)
            else:
                spans.append((self._version, 1))
            self._tokens_made += 1
        return GeneratedCompletion(
            token_ids=token_ids,
            logprobs=logprobs,
            version_spans=spans,
            finish_reason="stop" if ends else "length",
            stop_string="",
            text=self._text(token_ids),
        )

    def _plan(self, request: GenerationRequest, max_tokens: int) -> tuple[int, bool]:
        """Number of tokens, and whether the last one is the end-of-sequence token."""
        key = (request.ordinal, request.seed)
        if request.ignore_eos or _fraction("cut", *key) < 1 / CUT_SHORT_ONE_IN:
            return max_tokens, False
        shortest = min(self._settings.min_tokens, max_tokens)
        return shortest + int(_fraction("length", *key) * (max_tokens - shortest + 1)), True

    def _token(self, request: GenerationRequest, place: int) -> int:
        fraction = _fraction(self._digest, request.ordinal, request.seed, place)
        return self._vocabulary[int(fraction * len(self._vocabulary))]

    def _logprob(self, *key: object) -> float:
        return -0.02 - 2.0 * _fraction("logprob", *key)

    def _text(self, token_ids: list[int]) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(token_ids))

    def _check(self, weights: StagedWeights) -> None:
        """Any weights will do."""

    async def _swap(self, weights: StagedWeights, version: int, *, drop_kv: bool) -> float:
        self._digest = await asyncio.to_thread(_digest_of_bytes, weights)
        self._tokens_made += 1
        return 0.0


def _digest_of_bytes(weights: StagedWeights) -> str:
    """The weights digest (see `offbeat.weights.manifest`) of what the file really holds, in hex."""
    found = []
    with weights.path.open("rb") as file:
        content = memoryview(b"")
        if weights.path.stat().st_size:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for spec in weights.tensors:
            held = checkpoint.TensorSpec()
            held.CopyFrom(spec)
            held.hash = hash_of(content[spec.offset : spec.offset + spec.nbytes])
            found.append(held)
    return weights_digest(found).hex()
