"""The gRPC face of the learner. Served by rank 0."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from offbeat.v1 import learner_pb2 as learner
from offbeat.v1 import learner_pb2_grpc as learner_grpc
from services.learner.progress import Board, Controls

SERVICE_NAME = learner.DESCRIPTOR.services_by_name["LearnerService"].full_name

ENDED = {learner.LEARNER_STATE_FINISHED, learner.LEARNER_STATE_FAILED}


class LearnerServicer(learner_grpc.LearnerServiceServicer):
    """Answers from the board, and passes wishes to the loop through the controls."""

    def __init__(
        self, board: Board, controls: Controls, *, run_id: str, learner_id: str, ranks: int
    ) -> None:
        self._board = board
        self._controls = controls
        self._run_id, self._learner_id, self._ranks = run_id, learner_id, ranks

    async def GetStatus(
        self, request: learner.LearnerServiceGetStatusRequest, context: grpc.aio.ServicerContext
    ) -> learner.LearnerServiceGetStatusResponse:
        return learner.LearnerServiceGetStatusResponse(
            run_id=self._run_id,
            learner_id=self._learner_id,
            ranks=self._ranks,
            progress=self._board.read(),
            checkpoint_step=self._board.checkpoint_step,
            waiting_seconds=self._board.waiting_seconds,
            uptime_seconds=asyncio.get_running_loop().time() - self._board.started,
        )

    async def WatchProgress(
        self, request: learner.WatchProgressRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[learner.WatchProgressResponse]:
        async for progress in self._board.watch():
            if progress.step >= request.after_step:
                yield learner.WatchProgressResponse(progress=progress)

    async def SaveCheckpoint(
        self, request: learner.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> learner.SaveCheckpointResponse:
        before = self._board.read()
        if before.state in ENDED:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "the run has ended; nothing is left to save"
            )
        self._controls.save.set()
        async for progress in self._board.watch():
            if not self._controls.save.is_set() and self._board.checkpoint_step >= before.step:
                break
            if progress.state in ENDED:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION, "the run ended before the checkpoint"
                )
        return learner.SaveCheckpointResponse(
            step=self._board.checkpoint_step, path=self._board.checkpoint_path
        )

    async def Pause(
        self, request: learner.PauseRequest, context: grpc.aio.ServicerContext
    ) -> learner.PauseResponse:
        self._controls.pause()
        return learner.PauseResponse(step=self._board.read().step)

    async def Resume(
        self, request: learner.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> learner.ResumeResponse:
        self._controls.resume()
        return learner.ResumeResponse()

    async def Stop(
        self, request: learner.StopRequest, context: grpc.aio.ServicerContext
    ) -> learner.StopResponse:
        self._controls.save_on_stop = request.save_checkpoint
        self._controls.stopped_by_caller = True
        self._controls.request_stop()
        return learner.StopResponse(step=self._board.read().step)
