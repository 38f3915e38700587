"""`length_penalty`: the more tokens above a target, the lower."""

from typing import Any

from pydantic import Field

from offbeat.config.base import Settings


class LengthPenaltyParams(Settings):
    """Params of `length_penalty`."""

    target: int = Field(ge=0, description="Tokens that cost nothing.")
    coef: float = Field(
        gt=0, allow_inf_nan=False, description="Cost of each token above the target."
    )


class LengthPenalty:
    """-coef × max(0, tokens - target), the end-of-sequence token included in the count."""

    def __init__(self, **params: Any) -> None:
        self._params = LengthPenaltyParams(**params)

    def __call__(
        self, completions: list[str], completion_token_ids: list[list[int]]
    ) -> list[float]:
        """0.0 or a negative number per completion."""
        for index, (text, ids) in enumerate(zip(completions, completion_token_ids, strict=True)):
            if text and not ids:
                raise ValueError(
                    f"expected completion_token_ids, found none at index {index}; send the tokens along with the text"
                )
        target, coef = self._params.target, self._params.coef
        return [-coef * max(0, len(ids) - target) for ids in completion_token_ids]
