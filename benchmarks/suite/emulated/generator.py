"""The generator service with an engine that sleeps."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from benchmarks.suite.emulated.devices import Devices
from offbeat.config.recipe import ModelSettings
from offbeat.weights.staged import StagedWeights
from services.generator.engines.base import Engine, GeneratedCompletion, GenerationRequest

FIRST_TOKEN, TOKENS = 3, 250


class SleepingEngine(Engine):
    """Completions of `max_tokens` tokens, all slots at the same speed. Tokens mean nothing."""

    computes_policy: ClassVar[bool] = False

    def __init__(self, devices: Devices, model: ModelSettings) -> None:
        super().__init__(slots=devices.slots, max_context=model.max_context)
        self._devices = devices
        self._paused_seconds = 0.0
        self._loads: list[tuple[float, int]] = []
        self._finished = 0

    async def start(self) -> None:
        """A device is there."""

    async def stop(self) -> None:
        """It stays there."""

    def progress(self) -> int:
        # A sleeping device always makes progress.
        return time.monotonic_ns()

    async def score_tokens(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(tokens) - 1) for tokens in sequences]

    async def _generate(self, request: GenerationRequest, max_tokens: int) -> GeneratedCompletion:
        began, paused = time.monotonic(), self._paused_seconds
        left = max_tokens * self._devices.decode_seconds
        while left > 0:
            await asyncio.sleep(left)
            while self._version is None:
                await asyncio.sleep(0.001)
            # While weights were loaded nothing was decoded.
            left, paused = self._paused_seconds - paused, self._paused_seconds
        tokens = [FIRST_TOKEN + (request.seed + place) % TOKENS for place in range(max_tokens)]
        return GeneratedCompletion(
            token_ids=tokens,
            logprobs=[-1.0] * max_tokens,
            version_spans=self._spans(began, max_tokens),
            finish_reason="length",
            stop_string="",
            text="word" * max_tokens,
        )

    def _spans(self, began: float, count: int) -> list[tuple[int, int]]:
        """Which version made how many of the tokens, by the times of the loads."""
        now = time.monotonic()
        later = [(at, version) for at, version in self._loads if at > began]
        before = [version for at, version in self._loads if at <= began]
        edges = [began, *(at for at, _ in later), now]
        versions = [*before[-1:], *(version for _, version in later)]
        places = [round(count * (edge - began) / max(1e-9, now - began)) for edge in edges]
        spans = [
            (version, end - start)
            for version, start, end in zip(versions, places[:-1], places[1:], strict=True)
        ]
        return [span for span in spans if span[1]]

    def _check(self, weights: StagedWeights) -> None:
        """Any weights will do."""

    async def _swap(self, weights: StagedWeights, version: int, *, drop_kv: bool) -> float:
        began = time.monotonic()
        # The bytes are read, as a copy to a device would.
        await asyncio.to_thread(weights.path.read_bytes)
        await asyncio.sleep(max(0.0, self._devices.load_seconds - (time.monotonic() - began)))
        seconds = time.monotonic() - began
        self._paused_seconds += seconds
        self._loads.append((time.monotonic(), version))
        return seconds


def main() -> int:
    """The service's own entry point, given another engine."""
    from services.generator import __main__ as service
    from services.generator import server

    def create(_: Any, model: ModelSettings, *, threads: int | None = None) -> Engine:
        return SleepingEngine(Devices.here(), model)

    server.create_engine = create
    return service.main()


if __name__ == "__main__":
    sys.exit(main())
