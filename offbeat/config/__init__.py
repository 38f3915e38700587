"""Settings: one recipe file configures every process of a run."""

from offbeat.config.load import load_recipe
from offbeat.config.recipe import Recipe

__all__ = ["Recipe", "load_recipe"]
