"""The command line is an interface: scripts depend on it. Whoever changes it changes this list, and CHANGELOG.md."""

import typer

from offbeat.cli.app import app
from offbeat.cli.serve import Service
from offbeat.local.commands import SERVICES

COMMANDS = {
    "run": ["RECIPE", "--set", "--dry-run", "--resume", "--checkpoint", "--runs"],
    "serve": [
        *("SERVICE", "--recipe", "--set", "--share-cores"),
        *("--nodes", "--node", "--meet"),
    ],
    "prepare": ["RECIPE", "--set"],
    "status": ["RUN", "--json", "--watch", "--runs"],
    "audit": ["RUN", "--runs", "--json"],
    "report": ["RUN", "--out", "--runs"],
    "export": ["RUN", "--out", "--adapter", "--runs"],
    "doctor": ["RECIPE", "--set", "--deep"],
}


def test_commands_and_options_are_the_known_ones() -> None:
    root = typer.main.get_command(app)
    assert [option for parameter in root.params for option in parameter.opts] == ["--version"]
    found = {}
    for name, command in root.commands.items():
        found[name] = [
            option if option.startswith("-") else parameter.metavar or option.upper()
            for parameter in command.params
            for option in parameter.opts
        ]
    assert found == COMMANDS


def test_every_service_can_be_served() -> None:
    assert tuple(Service) == SERVICES
