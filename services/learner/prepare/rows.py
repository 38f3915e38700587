"""The recipe's rows as examples for supervised training: the same split that the run itself uses."""

import logging

from offbeat.config.data import DataSettings
from offbeat.errors import DataError
from services.learner.data.prompts import PromptMaker
from services.learner.data.sources import Part, load_data
from services.learner.prepare.sft import Example

log = logging.getLogger(__name__)


def examples(data: DataSettings) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples, disjoint by prompt text. Raises `DataError` without an answer column."""
    if data.chat:
        raise DataError("prepare makes a policy without a chat template; set data.chat: false")
    raw = load_data(data)
    heldout = [example for part in raw.heldout for example in _examples(part, data)]
    held = {example.prompt for example in heldout}
    drawn = [example for part in raw.train for example in _examples(part, data)]
    train = [example for example in drawn if example.prompt not in held]
    log.info("%d of %d training rows left out: held out", len(drawn) - len(train), len(drawn))
    return train, heldout


def _examples(part: Part, data: DataSettings) -> list[Example]:
    """The part's rows that have a prompt. No tokenizer exists yet, and the text of a prompt needs none."""
    maker = PromptMaker(data, None, part)
    made = []
    for index, row in enumerate(part.rows):
        try:
            text = maker.text(row)
        except DataError as error:
            raise part.error(index, error) from error
        if "answer" not in row:
            found = ", ".join(sorted(row))
            raise part.error(index, f"prepare learns from a column `answer`, found {found}")
        if text:
            made.append(Example(text, str(row["answer"]), row))
    return made
