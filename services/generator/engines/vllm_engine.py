"""vLLM behind the engine port: `AsyncLLM` with the native weight-transfer hooks, on GPUs or a CPU.

vLLM runs in processes of its own; `vllm_plugin` is the part of this engine inside them. On a CPU one such process is
enough, so vLLM is told to keep its worker inside its engine core.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from offbeat.config.recipe import ModelSettings
from offbeat.config.workers import VllmEngine
from offbeat.errors import ConfigError, EngineError, WeightsError
from offbeat.weights.staged import StagedWeights
from services.generator.engines import model_folder
from services.generator.engines.base import (
    Engine,
    EngineFailed,
    GeneratedCompletion,
    GenerationRequest,
)
from services.generator.engines.threads import in_daemon_thread

PLUGIN = "services.generator.engines.vllm_plugin"
SCORING_SLOTS = 8
"""Places in vLLM's batch beyond `max_num_seqs`, so that scoring never waits for completions to end."""
CPU_KV_CACHE_MB = 128
STOP_SECONDS = 1.0
"""vLLM's processes rarely end by themselves when asked; they are killed after this time, and hold nothing durable."""

OWN_ARGUMENTS = frozenset(
    {
        "model",
        "dtype",
        "max_model_len",
        "load_format",
        "max_num_seqs",
        "tensor_parallel_size",
        "data_parallel_size",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "enforce_eager",
        "logprobs_mode",
        "weight_transfer_config",
        "worker_extension_cls",
        "generation_config",
    }
)
"""Arguments of vLLM that have a setting of their own or must be what this engine says."""


def prepare_environment(settings: VllmEngine, *, on_cpu: bool, threads: int | None) -> None:
    """Sets what vLLM reads from the environment, which its processes inherit. Must run before vllm is imported.

    Variables that the user has set are left alone, but for the thread count of the recipe and telemetry, which is off.
    """
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "ERROR" if on_cpu else "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # gRPC and fork do not go together.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if on_cpu:
        defaults |= {
            # Compiling costs minutes at the start, or seconds at the first request, for 5 to 10 %.
            "TORCH_COMPILE_DISABLE": "0" if settings.enforce_eager is False else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        }
        if settings.tensor_parallel_size == 1:
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


class VllmAsyncEngine(Engine):
    """Samples with vLLM. Prefix caching is on; its entries are salted with the version."""

    def __init__(
        self, settings: VllmEngine, model: ModelSettings, *, threads: int | None = None
    ) -> None:
        import torch

        super().__init__(slots=settings.max_num_seqs, max_context=model.max_context)
        reserved = sorted(OWN_ARGUMENTS & settings.extra.keys())
        if reserved:
            raise ConfigError(
                f"generator.engine.extra sets {', '.join(reserved)}, which the generator sets itself: "
                "use the setting of that name where there is one"
            )
        self._settings = settings
        self._model = model
        self._on_cpu = not torch.accelerator.is_available()
        self._llm: Any = None
        self._tokenizer: Any = None
        self._expected: Any = None
        self._nccl: Any = None
        self._steps = 0
        if settings.weight_transfer == "nccl" and self._on_cpu:
            raise ConfigError(
                "generator.engine.weight_transfer is nccl, but there is no GPU here: use file"
            )
        self._scoring = asyncio.Semaphore(SCORING_SLOTS)
        prepare_environment(settings, on_cpu=self._on_cpu, threads=threads)

    async def start(self) -> None:
        config = model_folder.read_config(self._model.path)
        model_folder.check_context(config, self.max_context)
        # Takes seconds to minutes; health and signals are answered meanwhile.
        self._llm, self._expected = await in_daemon_thread(self._build)
        self._nccl = self._nccl_transfer()
        self._tokenizer = self._llm.get_tokenizer()
        model_folder.check_eos(self._tokenizer.eos_token_id, self._model.path)

    def _nccl_transfer(self) -> Any:
        if self._settings.weight_transfer != "nccl":
            return None
        import torch

        from services.generator.engines.nccl_transfer import NcclTransfer, free_endpoint

        settings = self._settings
        return NcclTransfer(
            self._llm,
            workers=settings.tensor_parallel_size * settings.data_parallel_size,
            device=torch.device("cuda", torch.cuda.current_device()),
            endpoint=free_endpoint,
        )

    async def stop(self) -> None:
        if self._nccl is not None:
            self._nccl.close()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            # Not in a thread: vLLM's own task must not see its process go before it is cancelled.
            llm.shutdown(STOP_SECONDS)

    def progress(self) -> int:
        return self._steps

    async def score_tokens(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return list(await asyncio.gather(*[self._score(tokens) for tokens in sequences]))

    def _build(self) -> tuple[Any, Any]:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from services.generator.engines import vllm_plugin
        from services.generator.engines.expected_tensors import ExpectedTensors

        class QuietlyDeleted(AsyncLLM):
            """`stop` shuts it down; its destructor would fail at the end of the interpreter, with a traceback."""

            def __del__(self) -> None:
                pass

        expected = ExpectedTensors.of_folder(self._model.path)
        os.environ[vllm_plugin.GENERATOR_PID] = str(os.getpid())
        try:
            arguments = AsyncEngineArgs(**self.arguments())
        except TypeError as error:
            raise ConfigError(f"generator.engine.extra: {error}") from error
        try:
            llm = QuietlyDeleted.from_engine_args(arguments, stat_loggers=[self._step_counter()])
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"vLLM can't start with {self._model.path}: {error} (its own log above says more)"
            ) from error
        return llm, expected

    def arguments(self) -> dict[str, Any]:
        """vLLM's engine arguments; those of the recipe's `extra` come last."""
        from vllm.config.weight_transfer import WeightTransferConfig

        from services.generator.engines import vllm_plugin

        settings = self._settings
        own = {
            "model": self._model.path,
            "dtype": self._model.dtype,
            "max_model_len": self.max_context,
            # The first version is loaded like every other one.
            "load_format": "dummy",
            "max_num_seqs": self.slots + SCORING_SLOTS,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "data_parallel_size": settings.data_parallel_size,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "kv_cache_memory_bytes": self._kv_cache_bytes(),
            "enforce_eager": self._on_cpu
            if settings.enforce_eager is None
            else settings.enforce_eager,
            # Of the distribution that was sampled from; the default is the one before temperature.
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": WeightTransferConfig(
                backend="nccl" if settings.weight_transfer == "nccl" else vllm_plugin.BACKEND
            ),
            "worker_extension_cls": f"{PLUGIN}.{vllm_plugin.WorkerExtension.__name__}",
            # The model folder's sampling defaults are not used: every task says how to sample.
            "generation_config": "vllm",
        }
        defaults = {
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            # After a part of a prompt vLLM takes the step of a seeded request's random generator back, which the
            # CPU's generator can't do: the engine would end. Prompts are short beside a batch there anyway.
            "enable_chunked_prefill": False if self._on_cpu else None,
        }
        return own | defaults | settings.extra

    def _kv_cache_bytes(self) -> int | None:
        megabytes = self._settings.kv_cache_memory_mb
        if megabytes is None and self._on_cpu:
            # Left to itself vLLM asks for nearly all of the host's memory.
            megabytes = CPU_KV_CACHE_MB
        return None if megabytes is None else megabytes * 1024**2

    def _step_counter(self) -> Any:
        """A stat logger that counts steps of the model: the only news of a long completion before its end."""
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        engine = self

        # Of this class, because vLLM adds its own Prometheus metrics, at a cost, unless it is given such a one.
        class StepCounter(PrometheusStatLogger):
            def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
                pass

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any
            ) -> None:
                # Outputs without tokens come from a step of a long prompt, or tell that a request is gone.
                busy = scheduler_stats is not None and scheduler_stats.num_running_reqs > 0
                if iteration_stats is not None or busy:
                    engine._steps += 1

            def log_engine_initialized(self) -> None:
                pass

        return StepCounter

    async def _generate(self, request: GenerationRequest, max_tokens: int) -> GeneratedCompletion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop = list(request.stop)
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=request.seed,
            stop=stop or None,
            include_stop_str_in_output=bool(stop),
            ignore_eos=request.ignore_eos,
            max_tokens=max_tokens,
            logprobs=0,
            flat_logprobs=True,
            # Short completions cost more outside the model than in it: no text that nobody reads.
            detokenize=bool(stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        output = await self._run(request.request_id, request.prompt_token_ids, params)
        return self._completion(output.outputs[0], with_stop=bool(stop))

    async def _run(self, request_id: str, token_ids: Sequence[int], params: Any) -> Any:
        """The final output of one request."""
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = tokens_input(list(token_ids), cache_salt=str(self._version))
        final = None
        try:
            async for output in self._llm.generate(prompt, params, request_id):
                final = output
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed(f"vLLM failed on request {request_id}: {error!r}") from error
        except ValueError as error:
            raise EngineError(f"vLLM refused request {request_id}: {error}") from error
        if final is None:
            raise EngineFailed(f"vLLM ended request {request_id} without an output")
        return final

    def _completion(self, output: Any, *, with_stop: bool) -> GeneratedCompletion:
        token_ids = list(output.token_ids)
        spans = [
            (int(s.version), s.end - s.start)
            for s in output.weight_versions or ()
            if s.end > s.start
        ]
        logprobs = output.logprobs.logprobs
        if output.finish_reason not in {"stop", "length"} or not token_ids:
            raise EngineFailed(
                f"vLLM ended a completion with {output.finish_reason!r} after {len(token_ids)} tokens; "
                "expected stop or length"
            )
        if len(logprobs) != len(token_ids) or sum(count for _, count in spans) != len(token_ids):
            raise EngineFailed(
                f"vLLM gave {len(token_ids)} tokens, {len(logprobs)} log-probs, and versions {spans}; "
                "expected one log-prob and one version per token"
            )
        return GeneratedCompletion(
            token_ids=token_ids,
            logprobs=list(logprobs),
            version_spans=spans,
            finish_reason=output.finish_reason,
            stop_string=output.stop_reason if isinstance(output.stop_reason, str) else "",
            text=output.text if with_stop else self._text(token_ids),
        )

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    async def _score(self, tokens: Sequence[int]) -> list[float]:
        from vllm import SamplingParams

        if len(tokens) < 2:
            return []
        last = int(tokens[-1])
        # The last token is scored as a candidate for the one to be sampled, so that a sequence may
        # fill the whole context. Greedy, because then no temperature is applied.
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            logprob_token_ids=[last],
            detokenize=False,
        )
        async with self._scoring:
            output = await self._run("parity", tokens[:-1], params)
        scores = [
            entry[token].logprob
            for token, entry in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            )
        ]
        return [*scores, output.outputs[0].logprobs[0][last].logprob]

    def _check(self, weights: StagedWeights) -> None:
        self._expected.check(weights)

    async def _swap(self, weights: StagedWeights, version: int, *, drop_kv: bool) -> float:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from services.generator.engines.staged_tensors import entries

        await self._llm.pause_generation(mode="keep", clear_cache=drop_kv)
        began = time.perf_counter()
        try:
            if self._nccl is not None:
                await self._nccl.load(weights, version)
            else:
                info = {"path": str(weights.path), "tensors": entries(weights)}
                await self._llm.start_weight_update()
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
                await self._llm.finish_weight_update(weight_version=str(version))
        except Exception as error:  # vLLM passes on errors of its processes as bare Exception
            raise WeightsError(f"vLLM can't load version {version}: {error}") from error
        seconds = time.perf_counter() - began
        self._steps += 1
        await self._llm.resume_generation()
        return seconds
