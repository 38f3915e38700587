"""The prompts of a run: loaded rows become training prompts by ordinal, and held-out prompts in order.

Used by the learner's start-up, and by ``python -m services.learner.data``, which checks the data of a recipe.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offbeat.config import Recipe
from offbeat.config.data import DataSettings
from offbeat.errors import DataError
from services.learner.data.order import MixtureOrder, interleave
from services.learner.data.prompts import Prompt, PromptMaker
from services.learner.data.sources import Part, RawData, load_data
from services.learner.model import load_tokenizer

log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What became of the rows of one part."""

    what: str
    rows: int
    held_out: int = 0
    """Left out of training: the same prompt is held out."""
    empty: int = 0
    """Dropped: no token, or null in a column that the prompt needs."""
    too_long: int = 0
    longest: int = 0
    """Tokens of the longest prompt, dropped ones included."""
    used: int = 0
    share: float = 1.0
    """Of the prompts that are issued from its split."""
    passes: float = 0.0
    """How often the run goes through the part's prompts; 0 for held-out ones."""

    def as_text(self, limit: int) -> str:
        """One line for people. `limit`: tokens that a prompt may have."""
        often = f", each {self.passes:.2f} times in this run" if self.passes else ""
        return (
            f"{self.what}: {self.used} of {self.rows} prompts used ({self.share:.1%} of all{often}); "
            f"left out: {self.held_out} held out, {self.empty} empty, "
            f"{self.too_long} longer than {limit} tokens (longest: {self.longest})"
        )


class TrainingPrompts:
    """Training prompts by ordinal."""

    def __init__(
        self,
        parts: Sequence[Sequence[Prompt]],
        weights: Sequence[float] | None = None,
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        """`weights`: of the parts, None: by their sizes. Raises `DataError` when a part is empty."""
        sizes = [len(part) for part in parts]
        self._parts = parts
        self._order = MixtureOrder(sizes, weights or sizes, seed=seed, shuffle=shuffle)

    def at(self, ordinal: int) -> Prompt:
        """The prompt of an ordinal."""
        part, row = self._order.row(ordinal)
        return self._parts[part][row]

    @property
    def all(self) -> list[Prompt]:
        """Every prompt once, in the order of the sources."""
        return [prompt for part in self._parts for prompt in part]


@dataclass(frozen=True)
class Dataset:
    """What the learner issues."""

    train: TrainingPrompts
    heldout: list[Prompt]
    counts: list[Counts]
    tokenizer: Any
    """The policy's, as transformers loads it."""

    def as_dict(self) -> list[dict[str, Any]]:
        """The counts, for JSON."""
        return [asdict(counts) for counts in self.counts]


def prompt_limit(recipe: Recipe) -> int:
    """Longest prompt that a run can use, in tokens."""
    return min(recipe.data.max_prompt_tokens, recipe.longest_prompt)


def load_dataset(recipe: Recipe) -> Dataset:
    """Reads the rows, then loads the tokenizer and makes the prompts.

    Raises `DataError` and `ConfigError` for the data, the latter before any model library is imported where a file
    is wrong; `ModelError` for the tokenizer.
    """
    raw = load_data(recipe.data)
    return make_dataset(recipe, raw, load_tokenizer(recipe.model.path))


def make_dataset(recipe: Recipe, raw: RawData, tokenizer: Any) -> Dataset:
    """Makes all prompts. Logs what each part loses. Raises `DataError` naming the row, `ConfigError`."""
    settings, limit = recipe.data, prompt_limit(recipe)
    check_columns(settings, raw)
    heldout, heldout_counts = _make_parts(settings, raw.heldout, tokenizer, limit, set())
    held = {prompt.text for part in heldout for prompt in part}
    train, train_counts = _make_parts(settings, raw.train, tokenizer, limit, held)
    issued = recipe.schedule.steps * recipe.schedule.cohort_size
    for counts in train_counts:
        counts.passes = issued * counts.share / counts.used
    for counts in (*train_counts, *heldout_counts):
        dropped = counts.empty + counts.too_long
        log.log(logging.WARNING if dropped else logging.INFO, "%s", counts.as_text(limit))
    weights = _weights(raw.train, train)
    return Dataset(
        train=TrainingPrompts(train, weights, seed=recipe.run.seed, shuffle=settings.shuffle),
        heldout=[
            heldout[part][row]
            for part, row in interleave([len(p) for p in heldout], _weights(raw.heldout, heldout))
        ],
        counts=[*train_counts, *heldout_counts],
        tokenizer=tokenizer,
    )


def check_columns(settings: DataSettings, raw: RawData) -> None:
    """Raises `DataError` when `data.columns` names a column that no row has."""
    if settings.columns is None:
        return
    found = sorted({name for part in (*raw.train, *raw.heldout) for name in part.rows.columns})
    unknown = [name for name in settings.columns if name not in found]
    if unknown:
        raise DataError(
            f"data.columns: expected columns of the data ({', '.join(found)}), found {unknown[0]!r}"
        )


def _make_parts(
    settings: DataSettings, parts: Sequence[Part], tokenizer: Any, limit: int, held: Collection[str]
) -> tuple[list[list[Prompt]], list[Counts]]:
    made = [
        make_prompts(part, PromptMaker(settings, tokenizer, part), limit=limit, held=held)
        for part in parts
    ]
    weights = _weights(parts, [prompts for prompts, _ in made])
    for (_, counts), weight in zip(made, weights, strict=True):
        counts.share = weight / sum(weights)
    return [prompts for prompts, _ in made], [counts for _, counts in made]


def _weights(parts: Sequence[Part], prompts: Sequence[Sequence[Prompt]]) -> list[float]:
    """Weights of the parts; by their sizes, where the recipe gives none."""
    return [
        float(len(made)) if part.weight is None else part.weight
        for part, made in zip(parts, prompts, strict=True)
    ]


def make_prompts(
    part: Part, maker: PromptMaker, *, limit: int, held: Collection[str]
) -> tuple[list[Prompt], Counts]:
    """Prompts of a part's rows, in their order, and what was left out.

    Left out are prompts in `held`, empty ones, and those of more than `limit` tokens. Raises `DataError` when none is
    left, or naming the row that can't be used.
    """
    counts = Counts(part.rows.what, rows=len(part.rows))
    texts = _texts(part, maker, held, counts)
    prompts: list[Prompt] = []
    index = 0
    try:
        ids_of_texts = maker.tokenize([text for _, text in texts])
        for (index, text), ids in zip(texts, ids_of_texts, strict=True):
            counts.longest = max(counts.longest, len(ids))
            counts.empty += not ids
            counts.too_long += len(ids) > limit
            if 0 < len(ids) <= limit:
                prompts.append(Prompt(text, ids, maker.columns(part.rows.rows[index])))
    except DataError as error:
        raise part.error(index, error) from error
    counts.used = len(prompts)
    if not prompts:
        raise DataError(
            f"{counts.as_text(limit)}: no prompt is left; see data.max_prompt_tokens, model.max_context and the rows"
        )
    return prompts, counts


def _texts(
    part: Part, maker: PromptMaker, held: Collection[str], counts: Counts
) -> list[tuple[int, str]]:
    """Row number and text of the prompts that are neither empty nor held out; the others are counted."""
    texts: list[tuple[int, str]] = []
    index = 0
    try:
        for index, row in enumerate(part.rows):
            text = maker.text(row)
            if not text:
                counts.empty += 1
            elif text in held:
                counts.held_out += 1
            else:
                texts.append((index, text))
    except DataError as error:
        raise part.error(index, error) from error
    return texts
