"""``python -m services.learner --recipe FILE``: one rank of the learner (all of them under torchrun).

Exit codes: 0 the run is finished, 1 an error that a restart may cure, 2 do not restart (a mistake in the settings,
checkpoints that can't be written or read, a newer learner has taken over), 143 told to stop, after a checkpoint.
"""

import logging
import os
import sys

from offbeat.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Fenced,
    ModelError,
    OffbeatError,
    StreamError,
)
from offbeat.rpc.entry import parse_service_args
from offbeat.rpc.memory import keep_freed_memory
from offbeat.telemetry import setup_logs

log = logging.getLogger("services.learner")


def main() -> int:
    """Parses the recipe and reads the data before anything heavy is imported: a mistake there shows at once."""
    recipe = parse_service_args()
    keep_freed_memory()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    setup_logs(recipe.telemetry, "learner" if world == 1 else f"learner.{rank}")
    try:
        from services.learner.data.dataset import load_dataset

        # Only rank 0 issues prompts.
        dataset = load_dataset(recipe) if rank == 0 else None
        from services.learner.app import run_rank

        return run_rank(recipe, rank=rank, world=world, dataset=dataset)
    except (ConfigError, DataError, ModelError, CheckpointError, StreamError, Fenced) as error:
        log.error("%s", error)
        return 2
    except OffbeatError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
