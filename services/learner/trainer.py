"""The training core: policy, reference, DeepSpeed engine, updates. One object per rank; the learner's loop drives it.

Every public method is collective: all ranks call the same methods in the same order; arguments count on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offbeat.config import Recipe
from services.learner.batching import Group
from services.learner.snapshot import Snapshot


class Trainer:
    """Trains the policy of a recipe on groups.

    `rendezvous`: how ranks meet when there are several and no process group exists yet: a torch init_method such as
    file:///path or tcp://host:port; None: the environment of torchrun (env://). One rank alone needs none.
    """

    def __init__(
        self, recipe: Recipe, *, rank: int = 0, world: int = 1, rendezvous: str | None = None
    ) -> None:
        raise NotImplementedError

    @property
    def updates(self) -> int:
        """Optimizer updates done, over the whole run."""
        raise NotImplementedError

    def train_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Trains one step: N x T updates on the groups, in ordinal order. Any number of groups, 0 included.

        Returns the same metrics on every rank: loss, grad_norm, learning_rate, reward/mean, reward/std, kl (policy at
        the step's start to reference, k1, mean over sequences), drift_kl and drift_kl/lag_<n> (mu to pi_old, k3, mean over
        tokens), mismatch_kl (the same, lag 0 only), ess (of pi_old/mu, as a fraction), entropy, clip_fraction (losses
        with clipping), informative_fraction, response_length/mean, eos_rate, logprob_diff/max (max |log pi_theta - log mu|
        at the step's start), time/*. A metric that has no samples is absent.
        """
        raise NotImplementedError

    def snapshot(self, parity_sequences: Sequence[Sequence[int]] = ()) -> Snapshot:
        """Host copies of all parameters (rank 0) and the log-probs of the sequences under them."""
        raise NotImplementedError

    def parity_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence: log pi at temperature 1 of tokens 1 .. n-1, forward pass in the model's dtype."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Writes the whole training state to the folder (made if missing), fsynced; rank 0 writes."""
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, by any number of ranks and ZeRO stage. CheckpointError when it does not fit."""
        raise NotImplementedError

    def export(self, folder: Path) -> None:
        """Writes a model folder (safetensors, config, tokenizer) that transformers loads."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees the engine; ends the process group if this trainer made it."""
        raise NotImplementedError
