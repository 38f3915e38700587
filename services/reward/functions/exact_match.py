"""`exact_match`: 1 when the completion is the answer in a column, else 0."""

from typing import Any

from pydantic import Field

from offbeat.config.base import Settings
from services.reward.functions.answers import Extractor, Pattern, answers_of


class ExactMatchParams(Settings):
    """Params of `exact_match`."""

    column: str = Field("answer", description="Column that holds the answer.")
    strip: bool = Field(True, description="Ignore white space around both.")
    extract: Pattern | None = Field(
        None,
        description="Regular expression; its last match (or that match's first group) is compared.",
    )
    column_extract: Pattern | None = Field(
        None, description="As `extract`, for the column; where it does not match, the row is wrong."
    )
    ignore: str = Field("", description="Characters that are left out of both, such as commas.")


class ExactMatch:
    """Compares texts. A number in the column is compared as Python writes it; no match of `extract` gives 0."""

    def __init__(self, **params: Any) -> None:
        self._params = ExactMatchParams(**params)
        self._extract = Extractor(self._params.extract, strip=self._params.strip)

    def __call__(self, completions: list[str], **columns: list[Any]) -> list[float]:
        """1.0 or 0.0 per completion."""
        answers = answers_of(self._params.column, columns, self._params.column_extract)
        return [float(self._equal(*pair)) for pair in zip(completions, answers, strict=True)]

    def _equal(self, completion: str, answer: Any) -> bool:
        expected = str(answer).strip() if self._params.strip else str(answer)
        found = self._extract(completion)
        return found is not None and self._cleaned(found) == self._cleaned(expected)

    def _cleaned(self, text: str) -> str:
        return text.translate({ord(character): None for character in self._params.ignore})
