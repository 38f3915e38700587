"""The port of the engines: what the generator may ask of whatever samples the tokens.

    start -> load_weights (the first version) -> generate, generate, ... -> load_weights -> ... -> stop

An engine starts without weights: the first version comes from the checkpoint service like every other one, so there is
one way to get weights and the version on a token is always one that was really loaded.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.errors import EngineError
from offbeat.weights.staged import StagedWeights
from services.generator.engines.admission import Admission

UpdateMode = Literal["in_flight", "drain"]
KvPolicy = Literal["keep", "recompute"]


class EngineFailed(EngineError):
    """The engine is dead or holds no usable weights; only a restart or a full load helps."""


class PromptTooLong(EngineError):
    """The prompt leaves no room in the context; no engine with this context can serve it."""


@dataclass(frozen=True)
class GenerationRequest:
    """One completion of one prompt. k samples are k requests with different seeds; they share the prefix cache.

    The conventions are those of `offbeat.v1.SamplingParams`: temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 are
    off; a stop string stays in the completion. `ordinal` is used by the deterministic engine only.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: Sequence[str] = ()
    seed: int = 0
    ordinal: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True)
class GeneratedCompletion:
    """What was sampled. `token_ids` and `logprobs` have the same length.

    `logprobs` are natural logs of the sampled tokens' probabilities in the distribution they were drawn from, that is
    after temperature and cuts (greedy: of the plain softmax). `version_spans` is (version, number of tokens), in order.
    """

    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[tuple[int, int]]
    finish_reason: Literal["stop", "length"]
    stop_string: str
    text: str


@dataclass(frozen=True)
class LoadReport:
    """What a weight update cost, in seconds."""

    drain_seconds: float
    """Waiting for running completions to end; 0 in flight."""
    pause_seconds: float
    """The engine stood still: pause, load, resume."""
    load_seconds: float
    """The load itself, a part of `pause_seconds`."""


class Engine(ABC):
    """Base of the engines. One object per process, used from one event loop.

    A subclass gives `_generate`, `_swap`, `score_tokens`, `start`, `stop` and `progress`; who may run when is decided
    here, so it is the same for all engines.
    """

    computes_policy: ClassVar[bool] = True
    """False: log-probs are made up, so a parity check says nothing."""

    def __init__(self, *, slots: int, max_context: int) -> None:
        self.slots = slots
        self.max_context = max_context
        self._admission = Admission(slots)
        self._loading = asyncio.Lock()
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version that the engine holds; None before the first load and after one that failed half-way."""
        return self._version

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return self._admission.running

    @abstractmethod
    async def start(self) -> None:
        """Gets ready to load weights. Raises `EngineError` saying what is wrong with the model folder or settings."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends everything that the engine started. Requests under way fail."""

    @abstractmethod
    def progress(self) -> int:
        """A counter that grows only while the engine really works: steps of the model, weights loaded."""

    @abstractmethod
    async def score_tokens(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log pi (temperature 1) of tokens 1 .. n-1 of each sequence under the weights held now.

        Served even while no slot is free, so that a parity check never waits for long completions.
        """

    async def generate(self, request: GenerationRequest) -> GeneratedCompletion:
        """Samples one completion; waits for a free slot, and for a weight update under way.

        Cancelling the task aborts the request and frees its slot. Raises `PromptTooLong`, or `EngineFailed`.
        """
        room = self.max_context - len(request.prompt_token_ids)
        if room < 1 or not request.prompt_token_ids:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_token_ids)} tokens; expected 1 to {self.max_context - 1}, "
                "since model.max_context holds prompt and completion: drop the prompt or raise it"
            )
        async with self._admission.slot():
            if self._version is None:
                raise EngineFailed("the engine holds no weights: load a version first")
            return await self._generate(request, min(request.max_tokens, room))

    async def load_weights(
        self,
        weights: StagedWeights,
        version: int,
        *,
        mode: UpdateMode = "in_flight",
        kv: KvPolicy = "keep",
    ) -> LoadReport:
        """Replaces the weights. Requests that wait start with the new version; running ones go on (`in_flight`: with
        their next token under the new version) or end before (`drain`).

        `kv` says what happens to the KV cache of the running ones; entries of the prefix cache are never used by a
        request of another version. Raises `WeightsError`. When the new version can't be of this model, the old one is
        still held; when the load itself failed, none is, and nothing runs until a later load succeeds.
        """
        async with self._loading:
            self._check(weights)
            began = time.perf_counter()
            await self._admission.close(drain=mode == "drain")
            paused = time.perf_counter()
            self._version = None
            load_seconds = await self._swap(
                weights, version, drop_kv=mode == "drain" or kv == "recompute"
            )
            self._version = version
            self._admission.open()
            end = time.perf_counter()
            return LoadReport(paused - began, end - paused, load_seconds)

    @abstractmethod
    def _check(self, weights: StagedWeights) -> None:
        """Raises `WeightsError` when the weights can't be of this model."""

    @abstractmethod
    async def _generate(self, request: GenerationRequest, max_tokens: int) -> GeneratedCompletion:
        """`generate`, once a slot is held. `max_tokens` fits into the context."""

    @abstractmethod
    async def _swap(self, weights: StagedWeights, version: int, *, drop_kv: bool) -> float:
        """Loads the weights between two steps of the model; returns the seconds of the load itself.

        On return the engine runs again and labels tokens with `version`. When it raises, the engine stays paused.
        """
