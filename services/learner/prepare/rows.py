"""The recipe's rows as examples for supervised training: the same split that the run itself uses."""

import logging

from offbeat.config.data import DataSettings
from offbeat.errors import DataError
from services.learner.data.prompts import PromptMaker, Row
from services.learner.data.sources import load_heldout, load_rows
from services.learner.prepare.sft import Example

log = logging.getLogger(__name__)


def examples(data: DataSettings) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples, disjoint by prompt text. Raises `DataError` without an answer column."""
    if data.chat:
        raise DataError("prepare makes a policy without a chat template; set data.chat: false")
    # No tokenizer exists yet, and the text of a prompt needs none.
    maker = PromptMaker(data, tokenizer=None)
    heldout = [_example(row, maker) for row in load_heldout(data)]
    held = {example.prompt for example in heldout}
    drawn = [_example(row, maker) for row in load_rows(data.train, what="data.train")]
    train = [example for example in drawn if example.prompt not in held]
    log.info("%d of %d training rows left out: held out", len(drawn) - len(train), len(drawn))
    return train, heldout


def _example(row: Row, maker: PromptMaker) -> Example:
    if "answer" not in row:
        raise DataError(
            f"prepare: expected a column `answer` to learn from, found {', '.join(sorted(row))}"
        )
    return Example(maker.text(row), str(row["answer"]), row)
