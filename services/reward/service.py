"""The gRPC face of a reward worker: scores for people, and counters."""

from collections.abc import Awaitable
from typing import Any, NoReturn, cast

import grpc

from offbeat.errors import DataError
from offbeat.v1 import reward_pb2, reward_pb2_grpc
from services.reward.calling import Scorer
from services.reward.counters import Counters
from services.reward.records import Sample, sample_of_item
from services.reward.scoring import FunctionFailed

SERVICE_NAME = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
MAX_ITEMS = 1024


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Answers `Score` with the functions that score rollouts, once `scorer` is set."""

    def __init__(self, worker_id: str, counters: Counters) -> None:
        self.scorer: Scorer | None = None
        self._worker_id = worker_id
        self._counters = counters

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: Any
    ) -> reward_pb2.ScoreResponse:
        """See the proto."""
        if self.scorer is None:
            await _abort(
                context, grpc.StatusCode.UNAVAILABLE, "the reward functions are still being loaded"
            )
        if not 1 <= len(request.items) <= MAX_ITEMS:
            text = f"items: expected 1 to {MAX_ITEMS}, found {len(request.items)}"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        samples: list[Sample] = []
        for index, item in enumerate(request.items):
            try:
                samples.append(sample_of_item(item))
            except DataError as error:
                await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"item {index}: {error}")
        try:
            scores = await self.scorer.score(samples)
        except FunctionFailed as error:
            await _abort(context, grpc.StatusCode.INTERNAL, str(error))
        return reward_pb2.ScoreResponse(scores=scores)

    async def GetStatus(
        self, request: reward_pb2.RewardServiceGetStatusRequest, context: Any
    ) -> reward_pb2.RewardServiceGetStatusResponse:
        """See the proto."""
        counters = self._counters
        return reward_pb2.RewardServiceGetStatusResponse(
            reward_worker_id=self._worker_id,
            functions=self.scorer.names if self.scorer is not None else [],
            groups_in_flight=counters.groups_in_flight,
            groups_finished=counters.groups_finished,
            completions_scored=counters.completions_scored,
            groups_dead=counters.groups_dead,
            waiting_seconds=counters.waiting_seconds,
            uptime_seconds=counters.uptime_seconds,
            draining=counters.draining,
        )


async def _abort(context: Any, code: grpc.StatusCode, text: str) -> NoReturn:
    await cast(Awaitable[NoReturn], context.abort(code, text))
    raise AssertionError("abort raises")
