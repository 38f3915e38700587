"""Follows a run's progress through the learner's WatchProgress, across restarts of the learner."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc

from offbeat.local.addresses import newest_address
from offbeat.rpc import connect
from offbeat.v1 import learner_pb2 as learner
from offbeat.v1 import learner_pb2_grpc as learner_grpc

RETRY_SECONDS = 0.5


async def watch_progress(addresses: Path, report: Callable[[learner.Progress], None]) -> None:
    """Reports each progress that the run's learner sends; returns once the run is finished.

    A learner that is not there, or goes away, is looked for again, at the newest address.
    """
    while True:
        address = newest_address(addresses, "learner")
        if address is not None and await _follow(address, report):
            return
        await asyncio.sleep(RETRY_SECONDS)


async def _follow(address: str, report: Callable[[learner.Progress], None]) -> bool:
    """Whether the learner at `address` finished the run; False when the connection broke."""
    async with connect(address) as channel:
        stub = learner_grpc.LearnerServiceStub(channel)
        try:
            async for response in stub.WatchProgress(learner.WatchProgressRequest()):
                report(response.progress)
                if response.progress.state == learner.LEARNER_STATE_FINISHED:
                    return True
        except grpc.aio.AioRpcError:
            return False
    return False
