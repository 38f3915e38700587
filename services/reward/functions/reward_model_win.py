"""`reward_model_win`: 1 when a reward model scores the completion above a reference in a column, else 0.

The mean over held-out prompts is the win-rate of arXiv 2410.18252, where a large gold model stands in for people:
strictly above wins, equal scores lose. Meant for `use: evaluation`. Params are those of `reward_model`, and `column`.
"""

from typing import Any

from pydantic import Field

from services.reward.functions.answers import answers_of
from services.reward.functions.reward_model import RewardModel, RewardModelParams

ROUNDING = 1e-5
"""Two scores of one text may differ by so much: what a batch is padded to changes the order of its sums."""


class RewardModelWinParams(RewardModelParams):
    """Params of `reward_model_win`."""

    column: str = Field(description="Column with the completion to compare with.")


class RewardModelWin:
    """Scores both with one model."""

    def __init__(self, **params: Any) -> None:
        parsed = RewardModelWinParams(**params)
        self._column = parsed.column
        self._model = RewardModel(**parsed.model_dump(exclude={"column"}))
        self._known: dict[tuple[str, str], float] = {}

    def __call__(
        self, prompts: list[str], completions: list[str], **columns: list[Any]
    ) -> list[float]:
        """1.0 or 0.0 per completion."""
        references = [str(text) for text in answers_of(self._column, columns)]
        pairs = list(zip(prompts, references, strict=True))
        # Each evaluation asks for the same references: they are scored once.
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        if new:
            scores = self._model([prompt for prompt, _ in new], [text for _, text in new])
            self._known.update(zip(new, scores, strict=True))
        found = self._model(prompts, completions)
        return [
            float(score > self._known[pair] + ROUNDING)
            for score, pair in zip(found, pairs, strict=True)
        ]
