"""`offbeat run` with the emulated generator and learner: ``python -m benchmarks.suite.emulated.run RECIPE``."""

import sys
from collections.abc import Sequence

from offbeat.local import commands

EMULATED = ("generator", "learner")


def service_command(
    service: str,
    recipe_file: str,
    overrides: Sequence[str] = (),
    *,
    ranks: int = 1,
    node: commands.Node | None = None,
) -> tuple[str, ...]:
    """The command line of a service."""
    package = "benchmarks.suite.emulated" if service in EMULATED else "services"
    sets = [part for override in overrides for part in ("--set", override)]
    return (sys.executable, "-m", f"{package}.{service}", "--recipe", recipe_file, *sets)


def main() -> None:
    """The command line of `offbeat run`, for one recipe."""
    commands.service_command = service_command
    from offbeat.cli import main as offbeat

    sys.argv = ["offbeat", "run", *sys.argv[1:]]
    offbeat()


if __name__ == "__main__":
    main()
