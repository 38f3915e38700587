"""(c) and (d): what asynchrony is worth, and how near it comes to what the limits allow, with emulated devices.

G, R, T are the times that one cohort takes in the engine, the reward model and the learner. No schedule is faster than

    step >= max(G, R, T, (G + R + T) / (S + 1))        with max_lag S

since each device does one thing at a time, and cohort c is generated only after step c - S - 1. S = 0 is the sum. A
reward without work of its own has R = 0. Where generation goes on (S >= 1) a cohort is scored only when all of its
completions end together, as they do here; with completions of different lengths scoring would overlap with generation.
"""

import statistics
from dataclasses import dataclass

from benchmarks.suite.cells import AT_LEAST, AT_MOST, CellSpec, Row
from benchmarks.suite.emulated.devices import Devices
from benchmarks.suite.fixtures import merged, recipe_tree, tiny_model
from benchmarks.suite.options import Options
from benchmarks.suite.runs import EMULATED, run

PROMPTS, K, TOKENS = 16, 2, 20
LAGS = (0, 1, 2, 4, 8)


@dataclass(frozen=True)
class Balance:
    """Seconds of a cohort in the engine, the reward model and the learner."""

    name: str
    generate: float
    score: float
    train: float

    def limit(self, lag: int) -> float:
        """The shortest step."""
        parts = (self.generate, self.score, self.train)
        return max(*parts, sum(parts) / (lag + 1))


BALANCES = (
    Balance("balanced", 1.0, 0.0, 1.0),
    Balance("generation dominates", 1.0, 0.0, 0.4),
    Balance("training dominates", 0.4, 0.0, 1.0),
    Balance("slow reward", 1.0, 1.0, 1.0),
)


def cells(options: Options) -> list[CellSpec]:
    """One run per balance and max_lag; (c) and (d) look at the same runs, so a cell holds all lags of a balance."""
    return [
        CellSpec("d", balance.name, lambda balance=balance: measure(balance, options))
        for balance in BALANCES
    ]


def measure(balance: Balance, options: Options) -> list[Row]:
    """Step times at each max_lag, and their ratios to the limit and to max_lag 0."""
    lags = LAGS[:2] if options.quick else LAGS
    steps = {lag: _steps(balance, lag, options) for lag in lags}
    synchronous = statistics.median(steps[0])
    rows = [Row(f"step, max_lag {lag}", steps[lag], "s") for lag in lags]
    rows += [
        Row(
            f"(c) step ÷ limit {balance.limit(lag):.2f} s, max_lag {lag}",
            [seconds / balance.limit(lag) for seconds in steps[lag]],
            "x",
            (AT_MOST, _allowed(balance)) if lag else None,
        )
        for lag in lags
    ]
    for lag in lags[1:]:
        allowed = balance.limit(0) / balance.limit(lag)
        target = AT_LEAST, 1.6
        rows.append(
            Row(
                f"(d) synchronous ÷ asynchronous, max_lag {lag}",
                [synchronous / seconds for seconds in steps[lag]],
                "x",
                target if balance.name == "balanced" and lag == 1 else (AT_LEAST, 0.95 * allowed),
                note=f"the limits allow {allowed:.2f}",
            )
        )
    return rows


def _allowed(balance: Balance) -> float:
    dominated = balance.generate != balance.train
    return 1.03 if dominated else 1.08


def _steps(balance: Balance, lag: int, options: Options) -> list[float]:
    completions = PROMPTS * K
    devices = Devices(
        slots=completions,
        decode_seconds=balance.generate / TOKENS,
        train_seconds=balance.train,
    )
    changes = {
        "schedule": {
            "steps": (6 if options.quick else 14) + 2 * lag,
            "max_lag": lag,
            "prompts_per_step": PROMPTS,
        },
        "sampling": {"k": K, "max_tokens": TOKENS},
    }
    if balance.score:
        function = {
            "name": "slow",
            "path": "benchmarks.suite.rewards:slow",
            "params": {"seconds": balance.score / completions},
        }
        changes["reward"] = {"functions": [function]}
    model = tiny_model(options.scratch)
    tree = merged(recipe_tree(model, options, prompts=1000), changes)
    result = run(
        tree,
        options.scratch,
        name=f"overlap-{balance.name.replace(' ', '-')}-{lag}",
        program=EMULATED,
        environment=devices.environment(),
    )
    # The first steps train what was issued at once, at the start.
    return result.cycle_seconds(skip=2 + lag, cycle=lag + 1)
