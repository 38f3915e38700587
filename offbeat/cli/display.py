"""Shows a run while it goes on: a live panel on a terminal, plain lines elsewhere. Used by `offbeat run`."""

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.v1 import learner_pb2 as learner

PLAIN_SECONDS = 2.0
"""Least time between two plain lines about steps."""


def state_name(state: int) -> str:
    """LEARNER_STATE_TRAINING -> training."""
    name = learner.LearnerState.Name(learner.LearnerState.ValueType(state))
    return name.removeprefix("LEARNER_STATE_").lower()


def number(metrics: Mapping[str, float], name: str, form: str = "{:.3f}") -> str:
    """A metric as text; a dash while there is none."""
    return form.format(metrics[name]) if name in metrics else "–"


def alarms(metrics: Mapping[str, float]) -> list[str]:
    """Names of the alarms that the last step raised."""
    return sorted(
        name.removeprefix("alarm/")
        for name, value in metrics.items()
        if name.startswith("alarm/") and value
    )


def _alarm_text(metrics: Mapping[str, float]) -> str:
    raised = alarms(metrics)
    return f" ALARM {', '.join(raised)}" if raised else ""


def heldout_metric(metrics: Mapping[str, float], mode: str) -> str:
    """What a mode of evaluation is judged by: pass@1, or the mean reward where nothing passes or fails."""
    name = f"eval/{mode}/pass@1"
    return name if name in metrics else f"eval/{mode}/reward"


class Pace:
    """Time per step over the last steps, for the time that is left."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=20)

    def add(self, step: int, now: float) -> None:
        """Takes in that `step` steps were done at `now`. A step back (a resumed learner) starts anew.

        The time of step 0 is not a step's: models load and the first evaluation runs before it.
        """
        if step == 0:
            return
        if self._seen and step < self._seen[-1][0]:
            self._seen.clear()
        if not self._seen or step > self._seen[-1][0]:
            self._seen.append((step, now))

    def seconds_left(self, total: int, now: float) -> float | None:
        """Seconds until `total` steps are done; None before the second step."""
        if len(self._seen) < 2:
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        left = (total - last) * (ended - began) / (last - first)
        return max(0.0, left - (now - ended))


class Display:
    """The observer of a run that shows it. Use it as a context manager."""

    def __init__(self, console: Console, run_id: str) -> None:
        self._console = console
        self._run_id = run_id
        self._progress = learner.Progress()
        self._pace = Pace()
        self._began = time.monotonic()
        self._printed_at = 0.0
        self._printed: tuple[int, int] = (-1, -1)
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._progress.state and self._printed != (self._progress.step, self._progress.state):
            self._print_line()

    def event(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(
            f"{_clock(time.monotonic() - self._began)} {text}", markup=False, soft_wrap=True
        )

    def progress(self, progress: learner.Progress) -> None:
        """Takes in where the run is."""
        self._progress = progress
        now = time.monotonic()
        self._pace.add(progress.step, now)
        if self._live is not None:
            return
        # Without a terminal: each step, but not more often than a reader of a log wants; and the states before step 1.
        new_step = progress.step != self._printed[0]
        starting = progress.step == 0 and progress.state != self._printed[1]
        if starting or (new_step and now - self._printed_at >= PLAIN_SECONDS):
            self._print_line()

    def _print_line(self) -> None:
        last, metrics = self._progress, self._progress.metrics
        self._printed, self._printed_at = (last.step, last.state), time.monotonic()
        if last.step == 0:
            self.event(state_name(last.state))
            return
        heldout = number(metrics, heldout_metric(metrics, "greedy"), " heldout {:.3f}")
        self.event(
            f"step {last.step}/{last.total_steps} {state_name(last.state)} "
            f"reward {number(metrics, 'reward/mean')} pass {number(metrics, 'reward/pass')}"
            f"{'' if heldout == '–' else heldout} "
            f"lag {number(metrics, 'lag/mean', '{:.2f}')}/{number(metrics, 'lag/max', '{:.0f}')} "
            f"tok/s {number(metrics, 'tokens_per_second', '{:,.0f}')} "
            f"wait learner {number(metrics, 'wait/learner', '{:.0%}')} "
            f"generator {number(metrics, 'wait/generator', '{:.0%}')} "
            f"loss {number(metrics, 'loss', '{:.4f}')} version {last.version} eta {self._eta()}"
            f"{_alarm_text(metrics)}"
        )

    def _eta(self) -> str:
        left = self._pace.seconds_left(self._progress.total_steps, time.monotonic())
        return "–" if left is None else _clock(left)

    def _render(self) -> RenderableType:
        last = self._progress
        elapsed = _clock(time.monotonic() - self._began)
        head = Text.assemble(
            (f"{self._run_id}  ", "bold"),
            (f"{state_name(last.state) if last.state else 'starting'}  ", "cyan"),
            f"step {last.step}/{last.total_steps or '?'}  {elapsed} gone, {self._eta()} left",
        )
        bar = ProgressBar(total=max(1, last.total_steps), completed=last.step)
        return Group(head, bar, self._numbers())

    def _numbers(self) -> Table:
        last, metrics = self._progress, self._progress.metrics
        table = Table.grid(padding=(0, 2))
        rows = [
            (
                "reward",
                number(metrics, "reward/mean"),
                "pass@1 train",
                number(metrics, "reward/pass"),
            ),
            (
                *("held-out greedy", number(metrics, heldout_metric(metrics, "greedy"))),
                *("held-out sampled", number(metrics, heldout_metric(metrics, "sampled"))),
            ),
            (
                *("lag mean / max", _pair(metrics, "lag/mean", "{:.2f}", "lag/max", "{:.0f}")),
                *("tokens/s", number(metrics, "tokens_per_second", "{:,.0f}")),
            ),
            (
                *("learner waits", number(metrics, "wait/learner", "{:.0%}")),
                *("generator waits", number(metrics, "wait/generator", "{:.0%}")),
            ),
            (
                *("loss / kl", _pair(metrics, "loss", "{:.4f}", "kl", "{:.4f}")),
                *("seconds per step", number(metrics, "time/step_seconds", "{:.2f}")),
            ),
            (
                *("version / term", f"{last.version} / {last.term}"),
                *("trained / filtered / dead", f"{last.trained} / {last.filtered} / {last.dead}"),
            ),
            (
                *("alarms", ", ".join(alarms(metrics)) or "none"),
                *("alarms so far", number(metrics, "alarms", "{:.0f}")),
            ),
        ]
        for left, left_value, right, right_value in rows:
            table.add_row(Text(left, "dim"), left_value, Text(right, "dim"), right_value)
        return table


def _pair(metrics: Mapping[str, float], one: str, form: str, other: str, other_form: str) -> str:
    return f"{number(metrics, one, form)} / {number(metrics, other, other_form)}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"
