"""The learner service with a trainer that sleeps."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.emulated.devices import Devices
from offbeat.config import Recipe
from services.learner.batching import Group
from services.learner.snapshot import Snapshot

STATE = "state.json"


class SleepingTrainer:
    """Stands where `Trainer` does, on one rank. A step changes some of its weights, so that there is a delta."""

    def __init__(self, recipe: Recipe, *, rank: int = 0, world: int = 1) -> None:
        self._devices = Devices.here()
        self.updates = 0
        self.on_part: Callable[[str], None] | None = None
        count = int(self._devices.weights_mb * 1e6 / 2)
        self._weights = torch.zeros(count, dtype=torch.bfloat16)
        self._generator = torch.Generator().manual_seed(0)

    def train_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Takes `train_seconds`."""
        if self.on_part is not None:
            self.on_part("forward_backward")
        end = time.monotonic() + self._devices.train_seconds
        places = torch.randint(
            len(self._weights), (len(self._weights) // 200,), generator=self._generator
        )
        self._weights[places] += 0.01
        self.updates += 1
        time.sleep(max(0.0, end - time.monotonic()))
        return {"loss": 0.0, "groups": float(len(groups))}

    def snapshot(self, parity_sequences: Sequence[Sequence[int]] = ()) -> Snapshot:
        """A copy of the weights."""
        parity = [(list(s), [-1.0] * (len(s) - 1)) for s in parity_sequences]
        return Snapshot({"weights": self._weights.clone()}, self.updates, parity)

    def save(self, folder: Path) -> None:
        """Writes what `load` reads."""
        folder.mkdir(exist_ok=True)
        (folder / STATE).write_text(json.dumps({"updates": self.updates}), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote."""
        self.updates = json.loads((folder / STATE).read_text("utf-8"))["updates"]

    def export(self, folder: Path) -> None:
        """There is no model."""
        folder.mkdir(exist_ok=True)

    def close(self) -> None:
        """There is nothing to free."""


def main() -> int:
    """The service's own entry point, given another trainer."""
    from services.learner import __main__ as service
    from services.learner import app

    trainer: Any = SleepingTrainer
    app.Trainer = trainer
    return service.main()


if __name__ == "__main__":
    sys.exit(main())
