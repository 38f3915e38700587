"""``python -m services.learner.launch --ranks N ...``: the learner's ranks on this machine, through torchrun.

torchrun alone ends with 1 whatever a rank ended with; here the exit code is that of the rank that failed first, so that
whoever restarts the learner still sees the 2 of a mistake in the settings. All other arguments go to each rank.
"""

import argparse
import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

EXIT_CONFIG_ERROR = 2
SIGNALLED = 128


def main() -> int:
    """Runs the ranks to their end and returns the exit code."""
    parser = argparse.ArgumentParser(description="Starts all ranks of the learner on this machine.")
    parser.add_argument("--ranks", type=int, required=True, help="number of processes")
    arguments, of_ranks = parser.parse_known_args()
    # What a rank said last shall stand last in the log; how it ended is said below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    torchrun = ["--standalone", "--nproc-per-node", str(arguments.ranks)]
    try:
        run.main([*torchrun, "-m", "services.learner", *of_ranks])
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode != EXIT_CONFIG_ERROR:
            sys.stderr.write(f"rank {rank} ended first, with exit code {first.exitcode}\n")
        # A rank that a signal ended has a negative code.
        return first.exitcode if first.exitcode > 0 else SIGNALLED - first.exitcode
    except SignalException as error:
        return SIGNALLED + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
