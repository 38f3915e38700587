"""``python -m offbeat``: the `offbeat` command, for a Python whose scripts are not on PATH."""

from offbeat.cli import main

if __name__ == "__main__":
    main()
