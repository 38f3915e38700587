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
from offbeat.telemetry import setup_logs

log = logging.getLogger("services.learner")


def main() -> int:
    """Parses the recipe before anything heavy is imported, so that a mistake in it shows at once."""
    recipe = parse_service_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    setup_logs(recipe.telemetry, "learner" if world == 1 else f"learner.{rank}")
    try:
        from services.learner.app import run_rank

        return run_rank(recipe, rank=rank, world=world)
    except (ConfigError, DataError, ModelError, CheckpointError, StreamError, Fenced) as error:
        log.error("%s", error)
        return 2
    except OffbeatError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
