"""The gRPC face of the generator: completions for people, counters, drain."""

from collections.abc import Awaitable
from typing import Any, NoReturn, cast

import grpc

from offbeat.config.recipe import SamplingSettings
from offbeat.errors import DataError, EngineError
from offbeat.v1 import generator_pb2 as generator
from offbeat.v1 import generator_pb2_grpc as generator_grpc
from offbeat.v1 import samples_pb2 as samples
from services.generator.counters import Counters
from services.generator.engines import Engine, EngineFailed
from services.generator.prompts import PromptEncoder
from services.generator.records import check_sampling, check_tokens, completion_of, request_of
from services.generator.sampling_group import sample_group
from services.generator.worker import Worker

SERVICE_NAME = generator.DESCRIPTOR.services_by_name["GeneratorService"].full_name
MAX_K = 64


class GeneratorServicer(generator_grpc.GeneratorServiceServicer):
    """Answers with the engine that generates the rollouts. `worker` is set once there is one."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        sampling: SamplingSettings,
        counters: Counters,
        *,
        generator_id: str,
        engine_name: str,
        vocab_size: int | None,
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._sampling = sampling
        self._counters = counters
        self._generator_id = generator_id
        self._engine_name = engine_name
        self._vocab_size = vocab_size
        self.worker: Worker | None = None

    async def Generate(
        self, request: generator.GenerateRequest, context: Any
    ) -> generator.GenerateResponse:
        """See the proto."""
        if self._counters.draining or self._counters.version == 0:
            why = "is draining" if self._counters.draining else "holds no weights yet"
            await _abort(context, grpc.StatusCode.UNAVAILABLE, f"this generator {why}")
        try:
            prompt = list(await self._encoder.encode(request))
            check_tokens(prompt, self._vocab_size)
            sampling = request.sampling if request.HasField("sampling") else self._defaults()
            check_sampling(sampling)
            if request.k > MAX_K:
                raise DataError(f"k: expected at most {MAX_K}, found {request.k}")
        except DataError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        seeds = [request.seed + index for index in range(request.k or 1)]
        try:
            generated = await sample_group(
                self._engine,
                [request_of(f"call-{seed}", prompt, sampling, seed=seed) for seed in seeds],
            )
        except EngineFailed as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        except EngineError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return generator.GenerateResponse(
            completions=[
                completion_of(item, seed) for item, seed in zip(generated, seeds, strict=True)
            ],
            prompt_token_ids=prompt,
        )

    async def GetStatus(
        self, request: generator.GeneratorServiceGetStatusRequest, context: Any
    ) -> generator.GeneratorServiceGetStatusResponse:
        """See the proto."""
        counters = self._counters
        return generator.GeneratorServiceGetStatusResponse(
            generator_id=self._generator_id,
            engine=self._engine_name,
            version=counters.version,
            announced_version=counters.announced_version,
            groups_in_flight=counters.groups_in_flight,
            groups_finished=counters.groups_finished,
            tokens_generated=counters.tokens_generated,
            waiting_seconds=counters.waiting_seconds,
            uptime_seconds=counters.uptime_seconds,
            updates_applied=counters.updates_applied,
            update_pause_seconds=counters.update_pause_seconds,
            draining=counters.draining,
            parity_difference=counters.parity_difference,
        )

    async def Drain(self, request: generator.DrainRequest, context: Any) -> generator.DrainResponse:
        """See the proto."""
        if self.worker is None:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, "this generator is still starting")
        await self.worker.drain(request.grace_seconds or None)
        return generator.DrainResponse(
            groups_finished=self.worker.finished_in_drain,
            groups_returned=self.worker.returned_in_drain,
        )

    def _defaults(self) -> samples.SamplingParams:
        settings = self._sampling
        return samples.SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            max_tokens=settings.max_tokens,
            stop=settings.stop,
        )


async def _abort(context: Any, code: grpc.StatusCode, text: str) -> NoReturn:
    await cast(Awaitable[NoReturn], context.abort(code, text))
    raise AssertionError("abort raises")
