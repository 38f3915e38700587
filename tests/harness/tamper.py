"""A man in the middle of the checkpoint service's rpcs, who tampers with single chunks of weights.

async with Tamperer(service.address) as tamperer:
    client = CheckpointClient(tamperer.address, ...)
    tamperer.arm("flip", 3)             # the fourth chunk of the next transfer downwards, once
    tamperer.arm("cut", 0, "up", every_time=True)

Faults of a chunk: `cut` (the stream breaks before it), `flip` (one bit is changed), `reorder` (it comes after the next
one), `repeat` (it comes twice), `shorten` (only its first half comes, well formed), `end` (the stream ends before it as
if all were there). Of the header of a delta: `base` (it names another base).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc

from offbeat import rpc
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.connection import SERVICE
from offbeat.weights.frames import read_chunk, write_chunk
from tests.harness.proxy import Direction

Fault = Literal["cut", "flip", "reorder", "repeat", "shorten", "end", "base"]
CHUNK_FAULTS: tuple[Fault, ...] = ("cut", "flip", "reorder", "repeat", "shorten", "end")
HEADER = -1
"""Place of the header among the chunks."""


class _Cut(Exception):
    """The stream is to break here."""


class Tamperer:
    """Passes every rpc on to `target` (HOST:PORT), but for the chunks that are to be damaged."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._armed: dict[Direction, tuple[Fault, int, bool] | None] = {"down": None, "up": None}
        self.done = 0
        """Chunks tampered with so far."""
        self.chunks: dict[Direction, int] = {"down": 0, "up": 0}
        """Chunks of the last transfer."""
        self.slow_seconds = 0.0
        """Time for which each chunk downwards is held back."""

    async def __aenter__(self) -> Tamperer:
        self._channel = rpc.connect(self._target)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_Handler(self),))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)
        await self._channel.close()

    @property
    def address(self) -> str:
        """HOST:PORT to connect to."""
        return f"127.0.0.1:{self._port}"

    def arm(
        self, fault: Fault, place: int, direction: Direction = "down", *, every_time: bool = False
    ) -> None:
        """Tampers with the chunk number `place` of a transfer; once, or of every transfer."""
        self._armed[direction] = (fault, place, every_time)

    def disarm(self) -> None:
        """Passes on everything as it is."""
        self._armed = {"down": None, "up": None}

    def _take(self, direction: Direction, place: int) -> Fault | None:
        armed = self._armed[direction]
        if armed is None or armed[1] != place:
            return None
        if not armed[2]:
            self._armed[direction] = None
        self.done += 1
        return armed[0]

    async def tampered(
        self, messages: AsyncIterator[bytes], direction: Direction
    ) -> AsyncIterator[bytes]:
        """The messages of a transfer as the other side gets them."""
        number, held = 0, None
        async for message in messages:
            chunk = read_chunk(message)
            if chunk is None:
                yield self._header(message, direction)
                continue
            fault = self._take(direction, number)
            number += 1
            self.chunks[direction] = number
            if direction == "down" and self.slow_seconds:
                await asyncio.sleep(self.slow_seconds)
            if fault == "cut":
                raise _Cut
            if fault == "end":
                return
            if fault == "reorder":
                held = message
                continue
            if fault == "flip":
                middle = len(message) - len(chunk.data) // 2 - 1
                flipped = message[middle] ^ 0x40
                yield message[:middle] + bytes([flipped]) + message[middle + 1 :]
            elif fault == "shorten":
                yield write_chunk(chunk.offset, chunk.data[: len(chunk.data) // 2])
            else:
                yield message
            if fault == "repeat":
                yield message
            if held is not None:
                yield held
                held = None

    def _header(self, message: bytes, direction: Direction) -> bytes:
        if self._take(direction, HEADER) != "base":
            return message
        if direction == "down":
            answer = checkpoint.FetchResponse.FromString(message)
            answer.header.base_version += 1
            return answer.SerializeToString()
        request = checkpoint.PublishRequest.FromString(message)
        request.header.base_version -= 1
        return request.SerializeToString()

    # ---- the rpcs

    async def one(self, method: str, request: bytes, context: grpc.aio.ServicerContext) -> Any:
        """An rpc with one request and one answer."""
        return await self._answered(self._channel.unary_unary(method)(request), context)

    async def fetch(
        self, method: str, request: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """An rpc that answers with a stream."""
        call = self._channel.unary_stream(method)(request)
        try:
            if method.endswith("/Fetch"):
                async for message in self.tampered(call, "down"):
                    yield message
            else:
                async for message in call:
                    yield message
        except _Cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        except grpc.aio.AioRpcError as error:
            await self._refuse(error, context)
        finally:
            call.cancel()

    async def publish(
        self, method: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> Any:
        """An rpc whose request is a stream."""
        call = self._channel.stream_unary(method)()
        try:
            async for message in self.tampered(requests, "up"):
                await call.write(message)
            await call.done_writing()
        except _Cut:
            call.cancel()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the service has answered already
        return await self._answered(call, context)

    async def _answered(self, call: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            return await self._refuse(error, context)

    @staticmethod
    async def _refuse(error: grpc.aio.AioRpcError, context: grpc.aio.ServicerContext) -> None:
        trailing = tuple((key, value) for key, value in error.trailing_metadata() or ())
        await context.abort(error.code(), error.details() or "", trailing)


class _Handler(grpc.GenericRpcHandler):
    """Hands every method of the service to the tamperer, as bytes."""

    def __init__(self, tamperer: Tamperer) -> None:
        self._tamperer = tamperer

    def service(self, details: Any) -> Any:
        method: str = details.method
        of, tamperer = method.removeprefix(f"/{SERVICE}/"), self._tamperer

        # gRPC looks at what kind of function a handler is, so each is one of its own.
        async def stream(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            async for message in tamperer.fetch(method, request, context):
                yield message

        async def one(request: bytes, context: grpc.aio.ServicerContext) -> Any:
            return await tamperer.one(method, request, context)

        async def publish(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            return await tamperer.publish(method, requests, context)

        if of in {"Fetch", "Watch"}:
            return grpc.unary_stream_rpc_method_handler(stream)
        if of == "Publish":
            return grpc.stream_unary_rpc_method_handler(publish)
        return grpc.unary_unary_rpc_method_handler(one)
