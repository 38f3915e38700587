"""Who shows the answers that a policy first learns from. `SftSettings.demonstrator` names one of these."""

import random
from typing import Any

from services.learner.prepare.docstrings import SENTENCE_END

# How often the demonstrator is careless: while the skill is learned, and in the last part of the training.
FIRST, LAST, LAST_PART = 0.5, 0.8, 0.25


def careless(row: dict[str, Any], rng: random.Random, progress: float) -> str:
    """Right answers, and those of someone who forgets carries, borrows and minus signs, more and more often.

    A policy that imitates this knows how to add and subtract, but mostly does it wrongly: what
    reinforcement learning with a verifier can put right and more imitation can't. For `chain_sum` with
    two terms.
    """
    carelessness = FIRST if progress < 1 - LAST_PART else LAST
    if rng.random() >= carelessness:
        return str(row["answer"])
    return careless_answer(row["entry"]["metadata"]["expression"])


def careless_answer(expression: str) -> str:
    """The result of ``a + b`` or ``a - b`` column by column, without carry, borrow or sign."""
    left, sign, right = expression.split()
    larger, smaller = sorted((int(left), int(right)), reverse=True)
    result, place = 0, 1
    while larger or smaller:
        (larger, a), (smaller, b) = divmod(larger, 10), divmod(smaller, 10)
        column = a + b if sign == "+" else a - b
        # Nothing stands to the left of the last column: its carry is written down as it is.
        last = not (larger or smaller)
        result += place * (column if last and column >= 0 else column % 10)
        place *= 10
    return str(result)


# Part of the demonstrations that are extracts: at first, and in the last part of the training.
EXTRACTS, LAST_EXTRACTS, LAST_REFERENCES_PART = 1.0, 0.2, 0.4
EXTRACT_WORDS = (5, 9)


def extracts(row: dict[str, Any], rng: random.Random, progress: float) -> str:
    """The reference summary, or the first words of one of the post's sentences; the latter less often at the end.

    A policy of this size that is made from nothing learns from references alone how summaries begin, but hardly that
    they are about the post. Copying teaches it to look; what to copy, and when, is left to reinforcement learning.
    """
    share = EXTRACTS if progress < 1 - LAST_REFERENCES_PART else LAST_EXTRACTS
    if rng.random() >= share:
        return f" {row['reference']}"
    words = rng.choice(SENTENCE_END.split(row["post"])).split()
    return " " + " ".join(words[: rng.randint(*EXTRACT_WORDS)])
