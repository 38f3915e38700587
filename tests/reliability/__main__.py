"""`python -m tests.reliability campaign` or `soak`: what `make reliability` and `make soak` run."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.reliability import results
from tests.reliability.campaign import campaign
from tests.reliability.soak import soak


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays, and writes docs/results/reliability.md. An AssertionError says which promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("what", choices=["campaign", "soak", "page"])
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random")
    parser.add_argument("--minutes", type=float, default=30.0, help="of a soak")
    parser.add_argument("--share", type=float, default=1.0, help="of a campaign's faults")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/reliability"), help="for results and runs"
    )
    chosen = parser.parse_args(arguments)
    folder = (chosen.folder / f"seed-{chosen.seed}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    say = _clock()
    if chosen.what == "campaign":
        campaign(folder, chosen.seed, chosen.share, say)
    elif chosen.what == "soak":
        soak(folder, chosen.seed, chosen.minutes, say)
    say(f"written: {results.write(folder)}")
    return 0


def _clock() -> Callable[[str], None]:
    began = time.monotonic()

    def say(text: str) -> None:
        seconds = int(time.monotonic() - began)
        print(f"{seconds // 60:02}:{seconds % 60:02} {text}", flush=True)

    return say


if __name__ == "__main__":
    sys.exit(main())
