"""Where prompts come from, and how a row becomes a prompt."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from offbeat.config.base import Settings

PROMPT = "{prompt}"


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


class CsvSource(Settings):
    """A local CSV file whose first line names the columns; every value is text."""

    kind: Literal["csv"]
    path: str = Field(description="The file, absolute or relative to the recipe's folder.")
    delimiter: str = Field(",", min_length=1, max_length=1, description="Between two values.")


class ParquetSource(Settings):
    """A local Parquet file, or a folder whose ``*.parquet`` files are read in the order of their names."""

    kind: Literal["parquet"]
    path: str = Field(
        description="The file or folder, absolute or relative to the recipe's folder."
    )


class HuggingFaceSource(Settings):
    """A data set as the `datasets` package loads it: from the Hugging Face hub, or from a local folder."""

    kind: Literal["huggingface"]
    name: str | None = Field(None, description="owner/name on the hub.")
    path: str | None = Field(
        None,
        description="A local folder laid out like a hub repository, or written by save_to_disk.",
    )
    config: str | None = Field(None, description="Name of the configuration (subset).")
    split: str | None = Field(
        None, description="Such as train or train[:1000]; null: train, where there are splits."
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the hub.")

    @model_validator(mode="after")
    def _one_place(self) -> "HuggingFaceSource":
        if (self.name is None) == (self.path is None):
            raise ValueError("expected either name (on the hub) or path (a local folder)")
        if self.revision is not None and self.path is not None:
            raise ValueError("revision is only used with name; remove it")
        return self


class PythonSource(Settings):
    """A Python callable that returns a list of rows (dict of columns)."""

    kind: Literal["python"]
    path: str = Field(description="module:function, or file.py:function.")
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments.")


PlainSource = Annotated[
    ReasoningGymSource | JsonlSource | CsvSource | ParquetSource | HuggingFaceSource | PythonSource,
    Field(discriminator="kind"),
]


class MixturePart(Settings):
    """One source of a mixture."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]+$", description="Value of the column `part` in its rows."
    )
    source: PlainSource
    weight: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Its share of the prompts is weight / sum of weights; null in all parts: by their sizes.",
    )
    prompt: str | None = Field(None, description="As data.prompt, for this part.")
    messages: str | None = Field(None, description="As data.messages, for this part.")

    @model_validator(mode="after")
    def _one_form(self) -> "MixturePart":
        if self.prompt is not None and self.messages is not None:
            raise ValueError("expected prompt or messages, found both; remove one")
        return self


class MixtureSource(Settings):
    """Several sources, mixed in fixed shares. Each starts again from its first row on its own when it runs out."""

    kind: Literal["mixture"]
    parts: list[MixturePart] = Field(min_length=2)

    @model_validator(mode="after")
    def _parts_fit(self) -> "MixtureSource":
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError(f"two parts have the same name: {names}; names must differ")
        if len({part.weight is None for part in self.parts}) > 1:
            raise ValueError("expected a weight for every part or for none, found some with")
        return self


Source = Annotated[
    ReasoningGymSource
    | JsonlSource
    | CsvSource
    | ParquetSource
    | HuggingFaceSource
    | PythonSource
    | MixtureSource,
    Field(discriminator="kind"),
]


class DataSettings(Settings):
    """Prompts for training and for evaluation."""

    train: Source
    heldout: Source | None = Field(
        None,
        description="Prompts for evaluation. Prompts that stand here too are taken out of train.",
    )
    prompt: str = Field(
        PROMPT, description="Format string over the columns that makes the prompt's text."
    )
    messages: str | None = Field(
        None,
        description="Column with a conversation (role and content of each turn) in place of `prompt`.",
    )
    chat: bool = Field(False, description="Put the text through the chat template as a user turn.")
    system: str | None = Field(
        None, description="System turn, for conversations that have none of their own."
    )
    chat_template: str | None = Field(
        None, description="Jinja text in place of the tokenizer's own template; null: its own."
    )
    reply_column: str | None = Field(
        None,
        description="Column made of the assistant's last turn, which is cut off `messages` (a reference to compare "
        "with); null: conversations that end with such a turn are an error.",
    )
    strip: bool = Field(
        False, description="Take white space off both ends of the filled-in `prompt`."
    )
    chat_params: dict[str, Any] = Field(
        default_factory=dict,
        description="Further variables of the chat template, such as enable_thinking.",
    )
    columns: list[str] | None = Field(
        None, description="Columns carried along to the reward functions; null: all."
    )
    shuffle: bool = Field(True, description="Shuffle each epoch by the run's seed.")
    max_prompt_tokens: int = Field(
        512, gt=0, description="Longer prompts are dropped at the start, and counted."
    )

    @property
    def part_names(self) -> list[str]:
        """Names of the parts of all mixtures, each once."""
        sources = (self.train, self.heldout)
        parts = [p for s in sources if isinstance(s, MixtureSource) for p in s.parts]
        return list(dict.fromkeys(part.name for part in parts))

    @model_validator(mode="after")
    def _settings_fit(self) -> "DataSettings":
        for name in ("system", "chat_params", "chat_template"):
            if getattr(self, name) not in (None, {}) and not self.chat:
                raise ValueError(f"{name} is only used with chat: true; remove it or set chat")
        if self.messages is not None and self.prompt != PROMPT:
            raise ValueError("expected prompt or messages, found both; remove one")
        sources = (self.train, self.heldout)
        parts = [p for s in sources if isinstance(s, MixtureSource) for p in s.parts]
        messages = [self.messages, *(part.messages for part in parts)]
        if not self.chat and messages.count(None) < len(messages):
            raise ValueError("messages need a chat template: set chat: true")
        if self.reply_column is not None and messages.count(None) == len(messages):
            raise ValueError("reply_column is only used with messages; remove it")
        return self
