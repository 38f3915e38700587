"""A chat-completions endpoint on a real port, which answers as a test tells it to."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def reply(text: str | None, finish_reason: str = "stop", **fields: Any) -> web.Response:
    """A whole answer with one reply."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    choices = [{**choice, "finish_reason": finish_reason}]
    return web.json_response({"id": "x", "object": "chat.completion", "choices": choices, **fields})


class JudgeServer:
    """What was asked, and how many connections and requests there were at once."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.open_requests = self.most_requests = self.most_connections = 0
        self.answer: Answer = self.length
        self._runner: web.AppRunner | None = None

    async def length(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        """Scores a text by its length, as `Score: N`."""
        return reply(f"It is fine. Score: {len(body['messages'][-1]['content'])}")

    def script(self, *answers: Answer) -> None:
        """The first requests get these answers, in order; those after them get `length`."""
        left = list(answers)

        async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (left.pop(0) if left else self.length)(request, body)

        self.answer = answer

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        assert self._runner is not None and self._runner.server is not None  # noqa: PT018
        return len(self._runner.server.connections)

    async def start(self) -> None:
        """Listens on a port that the system chooses."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def stop(self) -> None:
        """Stops listening, and cuts what is open."""
        assert self._runner is not None
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.open_requests += 1
        self.most_requests = max(self.most_requests, self.open_requests)
        self.most_connections = max(self.most_connections, self.connections)
        try:
            body = json.loads(await request.text())
            self.requests.append(body)
            self.headers.append(request.headers)
            return await self.answer(request, body)
        finally:
            self.open_requests -= 1


@asynccontextmanager
async def judge_server() -> AsyncIterator[JudgeServer]:
    """A server, stopped when the block ends."""
    server = JudgeServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def status(code: int, text: str = "", **headers: str) -> Answer:
    """Answers with a status; underscores in the names of headers stand for hyphens."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=code, text=text, headers=named)

    return answer


def says(text: str | None, finish_reason: str = "stop") -> Answer:
    """Answers with a reply."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        return reply(text, finish_reason)

    return answer


def raw(text: str) -> Answer:
    """Answers 200 with a body that may be anything."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(text=text)

    return answer


async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Cuts the connection before an answer."""
    assert request.transport is not None
    request.transport.abort()
    raise web.HTTPInternalServerError


async def cut_in_the_middle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Promises more bytes than it sends."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return response


async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


async def drip(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Sends a byte now and then, without an end."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Sends without an end, as fast as it can."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * 65536)
