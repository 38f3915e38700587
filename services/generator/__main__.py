"""``python -m services.generator --recipe FILE``: one generator.

Exit codes: 0 stopped on request, 1 an error that a restart may cure, 2 a mistake in the settings or the model folder
(do not restart).
"""

import asyncio
import logging
import os
import sys

from offbeat.errors import ConfigError, ModelError, OffbeatError
from offbeat.rpc.entry import parse_service_args
from offbeat.rpc.memory import keep_freed_memory
from offbeat.telemetry import setup_logs

log = logging.getLogger("services.generator")


def main() -> int:
    """Parses the recipe before anything heavy is imported, so that a mistake in it shows at once."""
    recipe = parse_service_args()
    keep_freed_memory()
    setup_logs(recipe.telemetry, "generator")
    # Models are folders; nothing is ever looked up elsewhere.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if recipe.generator.threads is not None:
        # Read when the numerics library is imported, which is later.
        os.environ["OMP_NUM_THREADS"] = str(recipe.generator.threads)
    from services.generator.server import serve

    try:
        asyncio.run(serve(recipe))
    except (ConfigError, ModelError) as error:
        log.error("%s", error)
        return 2
    except OffbeatError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
