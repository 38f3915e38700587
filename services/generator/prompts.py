"""Turns the prompt of a `Generate` request into tokens. Used by the gRPC service only; tasks come as tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any

from offbeat.errors import DataError
from offbeat.v1 import generator_pb2 as generator


class PromptEncoder:
    """Tokenizes with the policy's own tokenizer, which is loaded when it is first needed."""

    def __init__(self, model_path: str) -> None:
        self._path = model_path
        self._tokenizer: Any = None
        self._loading = asyncio.Lock()

    async def encode(self, request: generator.GenerateRequest) -> Sequence[int]:
        """The prompt's tokens. Raises `DataError` when there is none, or no chat template for a message."""
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise DataError("prompt: expected text, message, or tokens, found none of them")
        if kind == "tokens":
            return list(request.tokens.token_ids)
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(self._load)
        if kind == "text":
            return list(self._tokenizer(request.text)["input_ids"])
        if self._tokenizer.chat_template is None:
            raise DataError(
                "message: the policy's tokenizer has no chat template; send text instead"
            )
        return list(
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": request.message}],
                add_generation_prompt=True,
                return_dict=False,
            )
        )

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path)
