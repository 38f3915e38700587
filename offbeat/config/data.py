"""Where prompts come from, and how a row becomes a prompt."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from offbeat.config.base import Settings


class ReasoningGymSource(Settings):
    """A seeded task generator of the `reasoning_gym` package. Columns: question, answer, entry (JSON)."""

    kind: Literal["reasoning_gym"]
    dataset: str = Field(description="Name of the data set in reasoning_gym, such as chain_sum.")
    params: dict[str, Any] = Field(default_factory=dict, description="Arguments of the data set.")
    seed: int = Field(0, ge=0, description="Seed of the first item.")
    size: int = Field(description="Number of items drawn.", gt=0)


class JsonlSource(Settings):
    """A local JSON-lines file; each line is an object, its keys are the columns."""

    kind: Literal["jsonl"]
    path: str = Field(description="The file, absolute or relative to the recipe's folder.")


class PythonSource(Settings):
    """A Python callable that returns a list of rows (dict of columns)."""

    kind: Literal["python"]
    path: str = Field(description="module:function, or file.py:function.")
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments.")


Source = Annotated[ReasoningGymSource | JsonlSource | PythonSource, Field(discriminator="kind")]


class DataSettings(Settings):
    """Prompts for training and for evaluation."""

    train: Source
    heldout: Source | None = Field(
        None,
        description="Prompts for evaluation. Prompts that stand here too are taken out of train.",
    )
    prompt: str = Field(
        "{prompt}", description="Format string over the columns that makes the prompt's text."
    )
    chat: bool = Field(False, description="Put the text through the chat template as a user turn.")
    system: str | None = Field(None, description="System turn of the chat template.")
    shuffle: bool = Field(True, description="Shuffle each epoch by the run's seed.")
    max_prompt_tokens: int = Field(
        512, gt=0, description="Longer prompts are dropped at the start, and counted."
    )

    @model_validator(mode="after")
    def _system_needs_chat(self) -> "DataSettings":
        if self.system is not None and not self.chat:
            raise ValueError("system is only used with chat: true; remove it or set chat")
        return self
