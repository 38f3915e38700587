"""Runs a whole recipe on one machine: the services as supervised child processes. Used by the `offbeat` command."""
