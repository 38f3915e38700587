"""Shares the CPU's cores out to the processes of a run on one machine. Used by `offbeat.local.commands`."""

import os

from offbeat.config import Recipe


def cores_available() -> int:
    """Cores that this process may use: a container's or a batch system's share, not the machine's number."""
    return len(os.sched_getaffinity(0))


def share_threads(recipe: Recipe, cores: int) -> dict[str, int]:
    """Threads for each process of a service, by the service's name.

    Settings (`learner.threads` and so on) win. Otherwise generators and learner, the two that compute, get half of the
    cores each, divided among their processes; with max_lag 0 they take turns, so each gets them all. A reward worker
    gets an eighth, the checkpoint service one. Nobody gets less than one, so more processes than cores share cores.

    >>> share_threads(recipe, cores=16)   # one process of each
    {'learner': 8, 'generator': 8, 'reward': 2, 'checkpoint': 1}
    """
    half = cores if recipe.schedule.max_lag == 0 else cores // 2

    def divided(share: int, processes: int) -> int:
        return max(1, share // max(1, processes))

    return {
        "learner": recipe.learner.threads or divided(half, recipe.learner.ranks),
        "generator": recipe.generator.threads or divided(half, recipe.generator.replicas),
        "reward": recipe.reward.threads or divided(cores // 8, recipe.reward.replicas),
        "checkpoint": 1,
    }
