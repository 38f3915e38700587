"""Everything that a run against a proxy reward needs, made from docstrings: `prepare: {kind: tldr}`.

Data, a supervised policy, preference pairs labelled by a gold reward, and a proxy reward model trained on them; the
set-up of arXiv 2410.18252, section 3, in miniature. One folder holds it all, whole or not at all:

    train.jsonl heldout.jsonl   rows: package, post, reference
    policy/                     the supervised policy, also the reference model and that of perplexities
    proxy/                      the reward model
    prepare.json                settings, counts, agreement of proxy and gold, seconds
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from offbeat.config import Recipe
from offbeat.config.base import Settings
from offbeat.errors import DataError, ModelError
from offbeat.imports import load_callable
from services.learner.data.prompts import PromptMaker
from services.learner.prepare.copying import CopyingSettings, train_copying
from services.learner.prepare.docstrings import Docstring, read_docstrings, whole_sentences
from services.learner.prepare.preferences import (
    Gold,
    Pair,
    ProxySettings,
    agreement,
    label_pairs,
    sample_texts,
    train_proxy,
)
from services.learner.prepare.sft import (
    VERSIONS_OF,
    Example,
    SftSettings,
    new_policy,
    save_policy,
    train_policy,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger(__name__)


class TldrSettings(Settings):
    """Params of `prepare: {kind: tldr}`."""

    packages: list[str] = Field(
        min_length=1, description="Installed packages whose docstrings are read; stdlib: Python's."
    )
    gold: str = Field(
        description="module:function or file.py:function, a reward function; labels the pairs."
    )
    heldout: int = Field(400, gt=0, description="Rows for evaluation.")
    seed: int = Field(0, ge=0, description="Seed of the split, the pairs' posts and their samples.")
    vocabulary: int = Field(2048, ge=300, description="Tokens of the byte-level BPE.")
    min_post_tokens: int = Field(14, gt=0)
    max_post_tokens: int = Field(72, gt=0, description="A post is cut after a whole sentence.")
    copying: CopyingSettings | None = Field(
        None, description="Training on repeated sequences, before that on demonstrations."
    )
    sft: SftSettings = SftSettings()
    proxy: ProxySettings = ProxySettings()


Row = dict[str, Any]


def prepare_tldr(settings: TldrSettings, recipe: Recipe, out: Path) -> dict[str, Any]:
    """Makes the folder `out` and returns what its prepare.json says.

    Raises `ModelError` when `out` exists, `DataError` when there is not enough text.
    """
    if out.exists():
        raise ModelError(
            f"{out}: expected no such folder, found one without a policy; remove it to prepare it again"
        )
    gold: Gold = load_callable(settings.gold, key="prepare.params.gold")
    longest = recipe.sampling.max_tokens
    clock = _Clock()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        folder = Path(work) / "made"
        folder.mkdir()
        tokenizer, train, heldout = make_data(settings, read_docstrings(settings.packages), longest)
        _write_rows(folder / "train.jsonl", train)
        _write_rows(folder / "heldout.jsonl", heldout)
        clock.lap("data")
        maker = PromptMaker(recipe.data, tokenizer)
        policy, copied = _train_policy(
            settings, tokenizer, train, maker, Path(work), folder / "policy"
        )
        clock.lap("policy")
        pairs, held = (
            _pairs(settings, gold, policy, tokenizer, rows, maker, longest)
            for rows in (
                train[: settings.proxy.posts],
                heldout[: settings.proxy.heldout_posts],
            )
        )
        clock.lap("pairs")
        train_proxy(
            settings.proxy, pairs, folder / "policy", Path(work) / "proxy", folder / "proxy"
        )
        agreed = {kind: agreement(folder / "proxy", p) for kind, p in _kinds(held).items() if p}
        clock.lap("proxy")
        described = {
            "settings": settings.model_dump(mode="json"),
            "parameters": policy.num_parameters(),
            "copied": copied,
            "rows": {"train": len(train), "heldout": len(heldout)},
            "train_rows_by_package": dict(Counter(row["package"] for row in train)),
            "pairs": {"train": len(pairs), "heldout": len(held)},
            "proxy_agreement": agreed,
            "seconds": clock.seconds,
            "versions": {"python": sys.version.split()[0]}
            | {name: importlib.metadata.version(name) for name in VERSIONS_OF},
        }
        (folder / "prepare.json").write_text(json.dumps(described, indent=2) + "\n")
        folder.rename(out)
    log.info("proxy and gold agree on held-out pairs: %s", agreed)
    return described


def make_data(
    settings: TldrSettings, docstrings: Sequence[Docstring], max_new_tokens: int
) -> tuple[PreTrainedTokenizerFast, list[Row], list[Row]]:
    """Tokenizer, training rows and held-out rows: no post and no reference is in both."""
    from services.learner.prepare.tokenizer import bpe_tokenizer

    tokenizer = bpe_tokenizer(
        (text for one in docstrings for text in (one.post, f" {one.reference}")),
        vocabulary=settings.vocabulary,
        max_length=settings.sft.max_context,
    )
    rows: list[Row] = []
    posts: set[str] = set()
    for one in docstrings:
        post = _cut(one.post, tokenizer, settings.max_post_tokens)
        # A summary that the policy could not write to its end would teach it not to end.
        ends = _length(tokenizer, f" {one.reference}") < max_new_tokens
        long_enough = _length(tokenizer, post) >= settings.min_post_tokens
        if ends and long_enough and post.lower() not in posts:
            posts.add(post.lower())
            rows.append({"package": one.package, "post": post, "reference": one.reference})
    log.info("%d of %d docstrings have the right length", len(rows), len(docstrings))
    if len(rows) <= settings.heldout:
        raise DataError(
            f"expected more than heldout = {settings.heldout} rows, found {len(rows)} in "
            f"{', '.join(settings.packages)}; name more packages"
        )
    random.Random(settings.seed).shuffle(rows)
    return tokenizer, rows[settings.heldout :], rows[: settings.heldout]


def _length(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    # Not verbose: texts that are still to be cut may be longer than the model's context.
    return len(tokenizer(text, verbose=False)["input_ids"])


def _cut(post: str, tokenizer: PreTrainedTokenizerFast, limit: int) -> str:
    kept = ""
    for beginning in whole_sentences(post):
        if _length(tokenizer, beginning) > limit:
            break
        kept = beginning
    return kept


def _train_policy(
    settings: TldrSettings,
    tokenizer: PreTrainedTokenizerFast,
    train: Sequence[Row],
    maker: PromptMaker,
    work: Path,
    out: Path,
) -> tuple[LlamaForCausalLM, float | None]:
    """The policy, and how well it copied before the demonstrations: None if it was not trained to."""
    from transformers import set_seed

    set_seed(settings.sft.seed)
    model = new_policy(settings.sft, tokenizer)
    copied = None
    if settings.copying is not None:
        copied = train_copying(
            settings.copying, model, tokenizer, settings.sft.seed, work / "copying"
        )
        log.info("the policy copies %.1f %% of the tokens that repeat", 100 * copied)
    examples = [Example(_prompt(maker, row), f" {row['reference']}", row) for row in train]
    train_policy(settings.sft, model, tokenizer, examples, lambda _: None, work / "sft")
    save_policy(settings.sft, model, tokenizer, out)
    return model, copied


def _pairs(
    settings: TldrSettings,
    gold: Gold,
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    maker: PromptMaker,
    max_new_tokens: int,
) -> list[Pair]:
    from transformers import set_seed

    set_seed(settings.seed)
    prompts = [_prompt(maker, row) for row in rows]
    sampled = [
        sample_texts(
            policy,
            tokenizer,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=settings.proxy.temperature,
        )
        for _ in range(settings.proxy.samples)
    ]
    # The reference comes first: `_kinds` tells pairs with it from those of two samples.
    candidates = [
        list(dict.fromkeys([f" {row['reference']}", *texts]))
        for row, texts in zip(rows, zip(*sampled, strict=True), strict=True)
    ]
    return label_pairs(rows, prompts, candidates, gold)


def _prompt(maker: PromptMaker, row: Row) -> str:
    text = maker.plain_text(row)
    if text is None:
        raise DataError(f"data.prompt needs a column that is null in {row}")
    return text


def _kinds(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    return {
        "all": list(pairs),
        "samples": [pair for pair in pairs if not pair.with_first],
        "with_reference": [pair for pair in pairs if pair.with_first],
    }


def _write_rows(file: Path, rows: Sequence[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class _Clock:
    """Seconds of one part after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part] = round(now - self._last, 1)
        self._last = now
        log.info("%s: %.0f s", part, self.seconds[part])
