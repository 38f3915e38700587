"""Reward functions: the built-in ones, a file each, and the registry that finds these and yours."""

from services.reward.functions.registry import BUILT_IN, RewardCallable, load_functions

__all__ = ["BUILT_IN", "RewardCallable", "load_functions"]
