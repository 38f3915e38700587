"""``python -m services.learner.launch --ranks N ...``: the learner's ranks on this machine, through torchrun.

With --nodes, the same is started on each of several machines, which meet at --meet.

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
    parser.add_argument("--ranks", type=int, required=True, help="number of processes here")
    parser.add_argument(
        "--nodes", type=int, default=1, help="machines that run this, each with as many"
    )
    parser.add_argument("--node", type=int, default=0, help="which of them this is; 0 has rank 0")
    parser.add_argument("--meet", metavar="HOST:PORT", help="node 0, where the ranks meet")
    arguments, of_ranks = parser.parse_known_args()
    # What a rank said last shall stand last in the log; how it ended is said below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    torchrun = ["--nproc-per-node", str(arguments.ranks), *meeting(arguments)]
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


def meeting(arguments: argparse.Namespace) -> list[str]:
    """torchrun's options for where the ranks meet."""
    if arguments.nodes == 1:
        return ["--standalone"]
    host, _, port = arguments.meet.rpartition(":")
    return [
        *("--nnodes", str(arguments.nodes), "--node-rank", str(arguments.node)),
        *("--master-addr", host, "--master-port", port),
    ]


if __name__ == "__main__":
    sys.exit(main())
