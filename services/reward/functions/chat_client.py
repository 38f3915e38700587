"""Asks an OpenAI-compatible chat-completions endpoint. Used by `judge`.

One client with one pool of connections, a bound on requests at once, one layer of retries with a deadline, and errors
that say what came back. Only what may pass by itself is tried again: 429, 5xx, and connections that fail, break or
hang. The key stands in no error and in no log.
"""

import asyncio
import contextlib
import email.utils
import itertools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2
from pydantic import BaseModel, Field, ValidationError

from offbeat.errors import RewardError

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 2**20
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
LOG_EVERY_SECONDS = 30.0
SHOWN = 300
"""Characters of an answer that an error shows."""
UNFINISHED = {"length", "content_filter"}
"""Finish reasons of replies that are not whole."""


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Reply(BaseModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)


@dataclass(eq=False)
class _Again(Exception):
    """A request failed in a way that may pass. `wait`: seconds that the server asked for."""

    why: str
    wait: float = 0.0


def delay_before(attempt: int, chance: float) -> float:
    """Seconds before the next request, after `attempt` failed ones (1, 2, …). `chance`: from 0 to 1.

    Doubles each time; half of it is left to chance, so that those who failed together do not come back together.
    """
    longest = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(attempt - 1, 32))
    return longest * (1 + chance) / 2


def asked_to_wait(header: str | None, now: float) -> float:
    """Seconds that a Retry-After header asks for, in either of its forms; 0 for none and for nonsense.

    `now`: seconds since 1970.
    """
    if not header:
        return 0.0
    with contextlib.suppress(ValueError, OverflowError):
        seconds = float(header)
        return seconds if 0 < seconds < float("inf") else 0.0
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    return 0.0


class ChatClient:
    """One endpoint. Used from one event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        key: Callable[[], str | None],
        max_concurrency: int,
        timeout_seconds: float,
    ) -> None:
        """`key`: tells the bearer token before each request, since a mounted secret may change. `timeout_seconds`:
        longest time of one request."""
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._key = key
        self._timeout = timeout_seconds
        self._slots = asyncio.Semaphore(max_concurrency)
        limits = httpx2.Limits(
            max_connections=max_concurrency, max_keepalive_connections=max_concurrency
        )
        # One limit on time, around all of a request: a byte now and then must not keep it alive.
        self._client = httpx2.AsyncClient(limits=limits, timeout=None)
        self._log_at = 0.0
        # It writes a line for each request.
        logging.getLogger("httpx2").setLevel(logging.WARNING)

    async def ask(self, body: dict[str, Any], deadline: float) -> str:
        """The text of the reply to a request. `deadline`: in the event loop's time.

        Raises `RewardError` when there is no whole reply until then, or the endpoint refuses the request.
        """
        began = time.monotonic()
        clock = asyncio.get_running_loop().time
        why = "no answer in time"
        for attempt in itertools.count(1):
            try:
                return _text_of(await self._request(body, deadline - clock()))
            except _Again as again:
                why = again.why or why
                wait = max(again.wait, delay_before(attempt, random.random()))
            if wait >= deadline - clock():
                raise RewardError(
                    f"{self._url}: no reply in {time.monotonic() - began:.3g} s and {attempt} tries, and no time "
                    f"left to try again in {wait:.3g} s; the last one: {why}"
                )
            self._log(why)
            await asyncio.sleep(wait)
        raise AssertionError("the loop has no end")

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def _request(self, body: dict[str, Any], left: float) -> bytes:
        """The body of a successful answer, within `left` seconds.

        Raises `_Again` (without a reason of its own when `left` was too short), or `RewardError` when asking again is
        of no use.
        """
        try:
            async with asyncio.timeout(left):
                await self._slots.acquire()
        except TimeoutError:
            raise _Again("") from None
        try:
            async with asyncio.timeout(min(self._timeout, left)):
                return await self._post(body)
        except TimeoutError:
            raise _Again(
                f"no answer within {self._timeout:g} s" if left > self._timeout else ""
            ) from None
        except httpx2.RequestError as error:
            raise _Again(f"{type(error).__name__} {error}".strip()) from error
        finally:
            self._slots.release()

    async def _post(self, body: dict[str, Any]) -> bytes:
        key = self._key()
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self._client.stream("POST", self._url, json=body, headers=headers) as response:
            found = bytearray()
            async for chunk in response.aiter_bytes():
                found += chunk
                if len(found) > MAX_REPLY_BYTES:
                    raise RewardError(
                        f"{self._url}: expected a reply of at most {MAX_REPLY_BYTES} bytes, found more"
                    )
        if response.is_success:
            return bytes(found)
        text = self._shown(found, key)
        status = f"HTTP {response.status_code} {response.reason_phrase}"
        if response.status_code == 429 or response.status_code >= 500:
            wait = asked_to_wait(response.headers.get("Retry-After"), time.time())
            raise _Again(f"{status}: {text}", wait)
        raise RewardError(f"{self._url} refuses the request with {status}: {text}")

    def _shown(self, body: bytearray, key: str | None) -> str:
        text = body.decode("utf-8", errors="replace").strip()
        return repr((text.replace(key, "***") if key else text)[:SHOWN])

    def _log(self, why: str) -> None:
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + LOG_EVERY_SECONDS
            log.warning("%s: trying again after: %s", self._url, why)


def _text_of(body: bytes) -> str:
    try:
        (choice,) = _Reply.model_validate_json(body).choices
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        shown = body[:SHOWN].decode("utf-8", errors="replace")
        raise RewardError(
            f"expected a chat completion, found {shown!r} ({where}: {first['msg']})"
        ) from None
    if choice.finish_reason in UNFINISHED:
        raise RewardError(
            f"expected a whole reply, found one that ended by {choice.finish_reason!r}; "
            "raise params.max_tokens where that is length"
        )
    return choice.message.content or ""


def request_body(
    model: str, system: str | None, text: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """A request for one reply to `text`. `settings`: further fields; None leaves a field out."""
    turns = [{"role": "system", "content": system}] if system is not None else []
    turns.append({"role": "user", "content": text})
    given = {name: value for name, value in settings.items() if value is not None}
    return {"model": model, "messages": turns, **given}
