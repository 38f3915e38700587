"""The process behind `math`: reads [answer, completion, seconds] as JSON lines, writes one reply per line.

It ends when its input does, so it can't outlive the worker for long.
"""

import json
import logging
import os
import signal
import sys
from typing import TextIO

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

KINDS = (LatexExtractionConfig(), ExprExtractionConfig())


def reply(answer: str, completion: str) -> dict[str, object]:
    """Whether the completion's final answer equals `answer`; an error when `answer` is not mathematics."""
    # Its own time limits need the signal that limits the whole comparison here.
    expected = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    if not expected:
        return {"error": f"expected a mathematical answer in the column, found {answer[:80]!r}"}
    found = parse(completion, KINDS, parsing_timeout=None)
    return {"equal": bool(found) and verify(expected, found, timeout_seconds=None)}


def main() -> None:
    """Replies until the input ends."""
    # What libraries write to standard output must not end up between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # An interrupt from the terminal reaches the whole process group; the worker decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # It warns that it has no time limit; the one below is ours.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _write(replies, "ready")
    for line in sys.stdin:
        answer, completion, seconds = json.loads(line)
        # The default action ends the process even inside a computation that never returns to Python.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answered = reply(answer, completion)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, json.dumps(answered))


def _write(replies: TextIO, text: str) -> None:
    replies.write(f"{text}\n")
    replies.flush()


if __name__ == "__main__":
    main()
