"""`reward_model`: the logit of a transformers sequence-classification model with one label.

The model reads text, so its tokenizer need not be the policy's. Batches are padded on the right; the score of a text
is the same as when it is scored alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from offbeat.config.base import Settings
from offbeat.errors import ModelError
from services.reward.functions.devices import find_device

CHAT = "chat"


class RewardModelParams(Settings):
    """Params of `reward_model`."""

    path: str = Field(description="Hugging Face folder of the reward model.")
    device: str = Field("auto", description="cpu, cuda, cuda:1 …; auto: cuda when there is one.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="In 16 bits a score depends on what it is batched with."
    )
    max_tokens: int = Field(
        16384, gt=0, description="Largest padded number of tokens of one batch."
    )
    max_length: int | None = Field(
        None,
        gt=1,
        description="Longer texts lose their beginning; null: they are an error past the model's context.",
    )
    template: str = Field(
        "{prompt}{completion}",
        description="How the text is made; chat: by the model's own chat template.",
    )
    special_tokens: bool | None = Field(
        None,
        description="Let the tokenizer add its special tokens (a beginning-of-text token, say); null: unless the "
        "template is chat, which writes them itself.",
    )
    append_eos: bool = Field(
        False, description="End the text with the end-of-sequence token if it does not yet."
    )

    @field_validator("template")
    @classmethod
    def _fits(cls, value: str) -> str:
        if value == CHAT:
            return value
        try:
            made = value.format(prompt="\0p", completion="\0c")
        except (IndexError, KeyError, ValueError) as error:
            raise ValueError(
                f"only {{prompt}} and {{completion}} may stand in it ({error!r})"
            ) from error
        if "\0c" not in made:
            raise ValueError("expected {completion} in it")
        return value


class RewardModel:
    """Scores texts in batches of like length."""

    def __init__(self, **params: Any) -> None:
        self._params = RewardModelParams(**params)
        self._tokenizer = _load_tokenizer(self._params)
        self._device = find_device(self._params.device)
        self._model = _load_model(self._params).to(self._device).eval()
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if context is not None and (self._params.max_length or 0) > context:
            raise ModelError(
                f"reward model {self._params.path}: max_length: expected at most {context}, its context, "
                f"found {self._params.max_length}"
            )
        self._context: int | None = context

    def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
        """One logit per completion."""
        texts = [self._text(*pair) for pair in zip(prompts, completions, strict=True)]
        ids = [self._encode(text, index) for index, text in enumerate(texts)]
        scores = [0.0] * len(ids)
        for batch in batches_by_tokens([len(one) for one in ids], self._params.max_tokens):
            for index, score in zip(
                batch, self._forward([ids[index] for index in batch]), strict=True
            ):
                scores[index] = score
        return scores

    def _text(self, prompt: str, completion: str) -> str:
        if self._params.template != CHAT:
            return self._params.template.format(prompt=prompt, completion=completion)
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False))

    def _encode(self, text: str, index: int) -> list[int]:
        limit, eos = self._params.max_length, self._tokenizer.eos_token_id
        if limit is not None and self._params.append_eos:
            limit -= 1
        special = self._params.special_tokens
        ids = self._tokenizer(
            text,
            add_special_tokens=self._params.template != CHAT if special is None else special,
            truncation=limit is not None,
            max_length=limit,
            verbose=False,
        )["input_ids"]
        if self._params.append_eos and (not ids or ids[-1] != eos):
            ids = [*ids, eos]
        if not ids:
            raise ValueError(
                f"expected a text with at least one token, found {text[:40]!r} at index {index}"
            )
        if self._context is not None and len(ids) > self._context:
            raise ValueError(
                f"expected at most {self._context} tokens, the reward model's context, found {len(ids)} at index "
                f"{index}; set params.max_length to cut the beginning off"
            )
        return list(ids)

    @torch.inference_mode()
    def _forward(self, ids: Sequence[list[int]]) -> list[float]:
        pad = self._pad_id(ids)
        if pad is None and len(ids) > 1:
            return [self._forward([one])[0] for one in ids]
        width = max(map(len, ids))
        input_ids = torch.tensor([one + [pad or 0] * (width - len(one)) for one in ids])
        mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in ids])
        # The model takes as a row's last token the last one that is not the pad token.
        self._model.config.get_text_config().pad_token_id = pad
        logits = self._model(
            input_ids=input_ids.to(self._device), attention_mask=mask.to(self._device)
        ).logits
        return [float(score) for score in logits.float().squeeze(-1).cpu()]

    def _pad_id(self, ids: Sequence[list[int]]) -> int | None:
        """The tokenizer's pad token, or, where it has none or uses it in a text (pad = eos), one that no text has.

        Padding is masked, so it may be any token; but a real token that looks like padding would be passed over.
        """
        if len(ids) == 1:
            return None
        used = {token for one in ids for token in one}
        pad = self._tokenizer.pad_token_id
        if pad is not None and pad not in used:
            return int(pad)
        rows = self._model.get_input_embeddings().num_embeddings
        return next((token for token in range(rows) if token not in used), None)


def batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of like length, each padded to at most `max_tokens` (or a single text that is longer)."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        # Sorted from the longest down: the first one of a batch sets its width.
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _load_tokenizer(params: RewardModelParams) -> Any:
    if not (Path(params.path) / "config.json").is_file():
        raise ModelError(
            f"reward model {params.path}: expected a Hugging Face folder with a config.json, found none; "
            "correct params.path"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(params.path, truncation_side="left")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"reward model {params.path}: its tokenizer can't be loaded: {error}"
        ) from error
    if params.append_eos and tokenizer.eos_token_id is None:
        raise ModelError(
            f"reward model {params.path}: append_eos needs an end-of-sequence token, and its tokenizer has none"
        )
    if params.template == CHAT and not tokenizer.chat_template:
        raise ModelError(
            f"reward model {params.path}: template: chat needs a chat template, and its tokenizer has none; "
            "give a template with {prompt} and {completion}"
        )
    return tokenizer


def _load_model(params: RewardModelParams) -> Any:
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            params.path, dtype=getattr(torch, params.dtype), output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"reward model {params.path}: can't be loaded: {error}") from error
    if report["missing_keys"]:
        raise ModelError(
            f"reward model {params.path}: expected all weights of a sequence-classification model, found none for "
            f"{', '.join(sorted(report['missing_keys'])[:5])}; is it a language model that was never trained "
            "as a reward model?"
        )
    if model.config.num_labels != 1:
        raise ModelError(
            f"reward model {params.path}: expected num_labels 1, found {model.config.num_labels}; "
            "use a model that gives one score"
        )
    return model
