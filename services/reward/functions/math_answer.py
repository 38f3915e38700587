"""`math`: 1 when the completion's final answer equals the one in a column as mathematics, else 0 (math-verify).

Comparing runs in a process of its own. A model can write 9^(9^(9^9)); evaluating that holds Python's lock for ever,
and with it the worker's heartbeats, and no thread can be stopped. A process can.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from pydantic import Field

from offbeat.config.base import Settings
from offbeat.errors import ConfigError, RewardError
from services.reward.functions.answers import Pattern, answers_of


class MathParams(Settings):
    """Params of `math`."""

    column: str = Field(
        "answer", description="Column that holds the answer: a number, an expression, or LaTeX."
    )
    column_extract: Pattern | None = Field(
        None,
        description="Regular expression; its last match in the column (or that match's first group) is the answer.",
    )
    timeout_seconds: float = Field(
        5.0, gt=0, description="Longest time for one comparison; past it there is no value (None)."
    )


class MathAnswer:
    """Asks a `Verifier`. A comparison that takes too long gives None: nobody knows whether it is right."""

    def __init__(self, **params: Any) -> None:
        self._params = MathParams(**params)
        self._verifier = Verifier(self._params.timeout_seconds)

    def __call__(self, completions: list[str], **columns: list[Any]) -> list[float | None]:
        """1.0, 0.0 or None per completion."""
        answers = answers_of(self._params.column, columns, self._params.column_extract)
        return [
            self._verifier.equal(str(answer), completion)
            for completion, answer in zip(completions, answers, strict=True)
        ]

    def close(self) -> None:
        """Ends the verifier's process."""
        self._verifier.close()


class Verifier:
    """A process that compares answers; it is started again after a comparison that took too long."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._process: subprocess.Popen[str] | None = None
        self._start()

    def equal(self, answer: str, completion: str) -> float | None:
        """1.0, 0.0, or None when it took too long. Raises `RewardError` when `answer` can't be understood."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        line = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([answer, completion, self._timeout]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            self._ended(process)
            return None
        reply = json.loads(line)
        if "error" in reply:
            raise RewardError(reply["error"])
        return float(reply["equal"])

    def close(self) -> None:
        """Ends the process: it reads the end of its input, or is killed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ended(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        process.communicate()
        if process.returncode != -signal.SIGALRM:
            raise RewardError(
                f"the math verifier's process ended with code {process.returncode}; see its output above"
            )

    def _start(self) -> subprocess.Popen[str]:
        module = "services.reward.functions.math_process"
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            self.close()
            raise ConfigError(
                "the math verifier did not start; is math-verify installed? See its output above"
            )
        return process
