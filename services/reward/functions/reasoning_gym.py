"""`reasoning_gym`: the score that a task of the `reasoning_gym` package gives to an answer."""

from typing import Any

import reasoning_gym
from pydantic import Field

from offbeat.config.base import Settings
from offbeat.errors import ConfigError
from services.reward.functions.answers import Extractor, Pattern, answers_of


class ReasoningGymParams(Settings):
    """Params of `reasoning_gym`."""

    dataset: str = Field(description="Name of the data set in reasoning_gym, such as chain_sum.")
    params: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the data set; few scores depend on them."
    )
    column: str = Field(
        "entry", description="Column that holds the item as reasoning_gym made it (JSON)."
    )
    strip: bool = Field(True, description="Take white space off both ends of the answer.")
    extract: Pattern | None = Field(
        None,
        description="Regular expression; its last match (or that match's first group) is scored.",
    )
    binary: bool = Field(False, description="Give 1 for a full score and 0 for any other.")


class ReasoningGym:
    """Calls `score_answer` of the data set. Some data sets give part of the score to wrong answers: see `binary`."""

    def __init__(self, **params: Any) -> None:
        self._params = ReasoningGymParams(**params)
        self._extract = Extractor(self._params.extract, strip=self._params.strip)
        try:
            arguments = {"size": 1, "seed": 0} | self._params.params
            self._dataset = reasoning_gym.create_dataset(self._params.dataset, **arguments)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"reasoning_gym can't make the data set {self._params.dataset!r} from {self._params.params}: "
                f"{error}; correct params.dataset or params.params"
            ) from error

    def __call__(self, completions: list[str], **columns: list[Any]) -> list[float]:
        """A score from 0 to 1 per completion."""
        entries = answers_of(self._params.column, columns)
        return [self._score(*pair) for pair in zip(completions, entries, strict=True)]

    def _score(self, completion: str, entry: Any) -> float:
        if not isinstance(entry, dict):
            raise ValueError(
                f"expected an item of reasoning_gym (JSON) in column {self._params.column!r}, "
                f"found {type(entry).__name__}"
            )
        score = float(self._dataset.score_answer(self._extract(completion), entry))
        return float(score >= 1.0) if self._params.binary else score
