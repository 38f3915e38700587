"""Plain `transformers` behind the engine port, for machines on which vLLM has no build.

Slow, and never chosen silently. One thread runs the model, a step at a time; between two steps sequences join and
leave, and weights are swapped.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import TransformersEngine
from offbeat.errors import EngineError, ModelError, WeightsError
from offbeat.weights.staged import StagedWeights
from services.generator.engines import model_folder
from services.generator.engines.base import (
    Engine,
    EngineFailed,
    GeneratedCompletion,
    GenerationRequest,
)
from services.generator.engines.decode_batch import DecodeBatch, RunningSequence, pad_left
from services.generator.engines.expected_tensors import ExpectedTensors
from services.generator.engines.staged_tensors import staged_tensors

log = logging.getLogger(__name__)


class TransformersLoopEngine(Engine):
    """Samples with a model of `transformers`, on the first accelerator or the CPU."""

    def __init__(
        self, settings: TransformersEngine, model: ModelSettings, *, threads: int | None = None
    ) -> None:
        super().__init__(slots=settings.max_num_seqs, max_context=model.max_context)
        self._settings = model
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._between_steps = asyncio.Lock()
        self._waiting: deque[RunningSequence] = deque()
        self._done: dict[int, asyncio.Future[None]] = {}
        self._news = asyncio.Event()
        self._steps = 0
        self._loop_task: asyncio.Task[None] | None = None
        self._model: Any = None
        self._own: dict[str, torch.Tensor] = {}
        self._batch: Any = None
        self._expected: Any = None

    async def start(self) -> None:
        config = model_folder.read_config(self._settings.path)
        model_folder.check_context(config, self.max_context)
        log.warning(
            "generator.engine is transformers: expect a small part of vLLM's speed; "
            "use it only where vLLM can't be installed"
        )
        await self._in_thread(self._build)
        self._loop_task = asyncio.create_task(self._loop(), name="transformers-engine")

    async def stop(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._thread.shutdown()

    def progress(self) -> int:
        return self._steps

    async def score_tokens(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        async with self._between_steps:
            return await self._in_thread(self._score, sequences)

    async def _generate(self, request: GenerationRequest, max_tokens: int) -> GeneratedCompletion:
        if self._loop_task is None or self._loop_task.done():
            raise EngineFailed("the transformers engine does not run: restart the generator")
        sequence = RunningSequence(request, max_tokens)
        done = self._done[id(sequence)] = asyncio.get_running_loop().create_future()
        self._waiting.append(sequence)
        self._news.set()
        try:
            await done
        except asyncio.CancelledError:
            sequence.cancelled = True
            raise
        finally:
            del self._done[id(sequence)]
        return sequence.completion()

    def _check(self, weights: StagedWeights) -> None:
        self._expected.check(weights)

    async def _swap(self, weights: StagedWeights, version: int, *, drop_kv: bool) -> float:
        # Held until the version is set, so that no step runs without one.
        async with self._between_steps:
            began = time.perf_counter()
            try:
                await self._in_thread(self._load, weights)
            except (OSError, ValueError) as error:
                raise WeightsError(f"version {version} can't be loaded: {error}") from error
            if drop_kv:
                self._batch.forget_cache()
            self._steps += 1
            self._version = version
            return time.perf_counter() - began

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _loop(self) -> None:
        """Runs steps while there are sequences."""
        while True:
            if not self._waiting and not self._batch.rows:
                self._news.clear()
                await self._news.wait()
            async with self._between_steps:
                version = self._version
                if version is not None:
                    await self._step(version)
            if version is None:
                # A swap is about to begin, or one failed; nothing runs until one succeeds.
                await asyncio.sleep(0.01)

    async def _step(self, version: int) -> None:
        batch = self._batch
        # Joining costs a pass over all that runs, so newcomers wait until half of it has ended.
        if self._waiting and len(batch.rows) <= self.slots // 2:
            batch.join([sequence for sequence in self._waiting if not sequence.cancelled])
            self._waiting.clear()
        taking_part = list(batch.rows)
        try:
            await self._in_thread(batch.step, version)
        except RuntimeError as error:
            self._fail(taking_part, error)
            raise
        self._steps += 1
        for sequence in taking_part:
            done = self._done.get(id(sequence))
            if sequence.finish_reason is not None and done is not None and not done.done():
                done.set_result(None)

    def _fail(self, sequences: Sequence[RunningSequence], error: Exception) -> None:
        for sequence in [*sequences, *self._waiting]:
            done = self._done.get(id(sequence))
            if done is not None and not done.done():
                done.set_exception(EngineFailed(f"the model failed: {error}"))

    def _build(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        path = self._settings.path
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            config = AutoConfig.from_pretrained(path)
            dtype = getattr(torch, self._settings.dtype)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ModelError(f"model.path {path}: {error}") from error
        self._expected = ExpectedTensors.of_folder(path)
        self._model = model.to(accelerator or "cpu").eval()
        self._own = _in_place(self._model)
        eos = {model_folder.check_eos(tokenizer.eos_token_id, path), *_extra_eos(path)}

        def decode(token_ids: list[int]) -> str:
            return tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )

        self._batch = DecodeBatch(self._model, eos=frozenset(eos), decode=decode)

    @torch.inference_mode()
    def _load(self, weights: StagedWeights) -> None:
        """Copies the tensors into the model, in place. Tied parameters share their memory."""
        for name, tensor in staged_tensors(weights):
            self._own[name].copy_(tensor)

    @torch.inference_mode()
    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        if self._version is None:
            raise EngineError("there are no weights to score with: load a version first")
        tokens, mask = pad_left(sequences, self._model.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        scores = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1).tolist()
        self._steps += 1
        return [row[len(row) - len(seq) + 1 :] for row, seq in zip(scores, sequences, strict=True)]


def _in_place(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its files, as views of its memory.

    Raises `ModelError` when transformers computes one of them, since a version can't be copied into it then.
    """
    own = model.state_dict()
    memory = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
    found = revert_weight_conversion(model, own)
    copied = [n for n, t in found.items() if t.untyped_storage().data_ptr() not in memory]
    if copied:
        raise ModelError(
            f"generator.engine transformers can't load versions of {type(model).__name__}: it has no memory of its own "
            f"for {len(copied)} tensors of the model's files, such as {copied[0]}; use the engine vllm"
        )
    return found


def _extra_eos(path: str) -> list[int]:
    """End-of-sequence tokens that only the generation settings of the model folder name."""
    if not (Path(path) / "generation_config.json").exists():
        return []
    eos = GenerationConfig.from_pretrained(path).eos_token_id
    return eos if isinstance(eos, list) else [eos] if eos is not None else []
