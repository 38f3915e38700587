"""What the emulated devices are told, by an environment variable that the processes of a run inherit."""

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "OFFBEAT_BENCHMARK_DEVICES"


@dataclass(frozen=True)
class Devices:
    """Times in seconds.

    `decode_seconds`: one token of all running completions; an engine with `slots` free slots so takes tokens ×
    decode_seconds for up to so many. `train_seconds`: one step of the learner. `load_seconds`: a load of weights; the
    engine stands still then. `weights_mb`: what is published after each step.
    """

    slots: int = 64
    decode_seconds: float = 0.05
    train_seconds: float = 1.0
    load_seconds: float = 0.0
    weights_mb: float = 8.0

    def environment(self) -> dict[str, str]:
        """What the run's processes must inherit."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def here(cls) -> "Devices":
        """Those of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))
