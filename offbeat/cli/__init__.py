"""The `offbeat` command. Each module holds one command and imports what that needs when it is called."""

import logging
import os
import sys

EXIT_ERROR = 1
EXIT_CONFIG_ERROR = 2


def main() -> None:
    """Entry point: runs the command line; errors that Offbeat knows become red text, never a traceback."""
    from offbeat.cli.app import app
    from offbeat.errors import ConfigError, OffbeatError
    from offbeat.local.signals import Interrupted

    # What a library warns of, this command says in its own words.
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    try:
        app(prog_name="offbeat")
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG_ERROR)
    except OffbeatError as error:
        _fail(str(error), EXIT_ERROR)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"{place}{error.strerror or error}", EXIT_ERROR)
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_code)


def _fail(text: str, code: int) -> None:
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\033[31m{text}\033[0m" if colour else text, file=sys.stderr)
    sys.exit(code)
