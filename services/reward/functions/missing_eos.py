"""`missing_eos`: punishes completions that were cut off instead of ending by themselves.

Judged by the finish reason of the completion alone. A search for the token over prompt and completion finds the one
in a chat template's prompt, which switches the penalty off without a word.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from offbeat.config.base import Settings
from services.reward.scoring import Role


class MissingEosParams(Settings):
    """Params of `missing_eos`."""

    mode: Literal["replace", "subtract"] = Field(
        description="replace: value is the total, whatever the other functions say; subtract: value is taken off it."
    )
    value: float = Field(
        allow_inf_nan=False, description="The total (replace), or what is taken off it (subtract)."
    )

    @model_validator(mode="after")
    def _penalty_is_positive(self) -> "MissingEosParams":
        if self.mode == "subtract" and self.value <= 0:
            raise ValueError(
                f"value: expected a positive number, which is subtracted, found {self.value:g}"
            )
        return self


class MissingEos:
    """A value for each cut-off completion, None for the others."""

    def __init__(self, **params: Any) -> None:
        parsed = MissingEosParams(**params)
        self.role = Role.REPLACEMENT if parsed.mode == "replace" else Role.PENALTY
        self._value = parsed.value if parsed.mode == "replace" else -parsed.value

    def __call__(self, finish_reasons: list[str]) -> list[float | None]:
        """The value where the finish reason is "length"."""
        return [self._value if reason == "length" else None for reason in finish_reasons]
