"""What the trainings of this folder ask of TRL's trainers alike: given order, fp32, nothing written, nothing shown."""

from pathlib import Path
from typing import Any

IGNORED = -100
"""Label of a token that the loss leaves out."""


def quiet(work: Path) -> dict[str, Any]:
    """Keyword arguments for `SFTConfig` and `RewardConfig`; `work` is a folder that they may use."""
    return {
        "output_dir": str(work),
        "train_sampling_strategy": "sequential",  # the rows come in the order that is wanted
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
