"""Samples a group: several requests that succeed or fail together. Used by the worker and by the gRPC service."""

import asyncio
from collections.abc import Sequence

from services.generator.engines import Engine, GeneratedCompletion, GenerationRequest


async def sample_group(
    engine: Engine, requests: Sequence[GenerationRequest]
) -> list[GeneratedCompletion]:
    """The completions, in the order of the requests. When one fails, or the caller is cancelled, all end."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
