"""What a generator holds while it works on a group, and who it is. Used by `worker`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from offbeat.streams.base import Delivery
from offbeat.v1 import samples_pb2 as samples
from services.generator.engines import GenerationRequest
from services.generator.planning import Range
from services.generator.records import now_unix_ms

Prompts = Delivery[samples.PromptTask]


@dataclass(eq=False)
class Group:
    """A prompt task that this generator holds."""

    delivery: Prompts
    requests: list[GenerationRequest]
    range: Range = field(init=False)
    work: asyncio.Task[None] | None = None
    """None while it waits for another version."""

    def __post_init__(self) -> None:
        self.range = Range.of(self.delivery.record)


@dataclass(frozen=True)
class Identity:
    """Who the generator is, and what its model can read."""

    run_id: str
    generator_id: str
    address: str
    engine: str
    vocab_size: int | None


@contextlib.asynccontextmanager
async def until(deadline_unix_ms: int) -> AsyncIterator[None]:
    """Raises TimeoutError inside the block once the wall clock passes the deadline; 0: never."""
    seconds = (deadline_unix_ms - now_unix_ms()) / 1000 if deadline_unix_ms else None
    async with asyncio.timeout(seconds):
        yield
