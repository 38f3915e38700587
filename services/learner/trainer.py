"""The training core: policy, reference, updates. One object per rank; the learner's loop drives it.

Every public method is collective: all ranks call the same methods in the same order; arguments count
on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from offbeat.config import Recipe
from offbeat.errors import CheckpointError
from services.learner import lora, metrics, state
from services.learner.batching import (
    Group,
    MicroBatch,
    Share,
    StepBatch,
    Unit,
    check_groups,
    fits,
    flattened,
    mini_batches,
    rows_in,
)
from services.learner.critic import Critic
from services.learner.distributed import (
    broadcast_groups,
    broadcast_sequences,
    device_of,
    join,
)
from services.learner.engine import Engine
from services.learner.logprobs import TokenScorer
from services.learner.losses import LossInputs, LossOutput, PreparedLoss, ValueLoss, build_loss
from services.learner.losses.ppo import PPOLoss
from services.learner.model import (
    check_model,
    load_policy,
    shard_name,
    write_companions,
    write_index,
    write_model,
)
from services.learner.preparation import Preparation
from services.learner.schedule import learning_rate
from services.learner.scoring import Passes
from services.learner.shards import ShardPlan, is_stored_as_computed, saved_buffers
from services.learner.snapshot import Snapshot
from services.learner.step import StepState

# Place of the values among the outputs of a `TokenScorer` with a value head.
VALUES = 2


class Trainer:
    """Trains the policy of a recipe on groups.

    `rendezvous`: how ranks meet when there are several and no process group exists yet: a torch
    init_method such as file:///path or tcp://host:port; None: the environment of torchrun (env://).
    One rank alone needs none.
    """

    def __init__(
        self, recipe: Recipe, *, rank: int = 0, world: int = 1, rendezvous: str | None = None
    ) -> None:
        self._recipe, self._settings = recipe, recipe.learner
        self._rank, self._world = rank, world
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        check_model(recipe.model.path, max_context=recipe.model.max_context)
        self._loss = build_loss(
            self._settings.loss,
            corrections=self._settings.corrections,
            max_tokens=recipe.sampling.max_tokens,
        )
        join(rank, world, rendezvous)
        state.seed_generator(recipe.run.seed, rank)
        self._device = device_of(rank)
        self._passes = Passes(recipe, rank=rank, world=world, device=self._device)
        self._adapter: lora.Adapter | None = None
        self._engine = self._build_engine()
        self._critic: Critic | None = None
        if isinstance(self._loss, PPOLoss) and not self._loss.shares_policy:
            self._critic = Critic(recipe, self._loss, self._passes)
        self._reference = self._build_reference()
        self._shards = self._plan_shards()
        self._updates = 0
        self.on_part: Callable[[str], None] | None = None
        """Told of each part of a step (the names under time/) as it begins."""

    @property
    def updates(self) -> int:
        """Optimizer updates done, over the whole run."""
        return self._updates

    def train_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Trains one step: N x T updates on the groups, in ordinal order. Any number of groups, 0 included.

        Returns the same metrics on every rank: loss, grad_norm, learning_rate, reward/mean,
        reward/std, kl (policy at the step's start to reference, k1, mean over sequences), drift_kl and
        drift_kl/lag_<n> (mu to pi_old, k3, mean over tokens), mismatch_kl (the same, lag 0 only), ess (of
        pi_old / mu, as a fraction), entropy, clip_fraction (losses with clipping), informative_fraction,
        advantage/* and correction/* (policy gradients),
        response_length/*, eos_rate, logprob_diff/max (max |log pi_theta - log mu| before the first
        update), time/*. They are of the completions that the loss runs through the model, but for
        rewards, lengths and endings. A metric without values is absent.
        """
        clock = metrics.Clock(self.on_part)
        with clock("broadcast"):
            groups = broadcast_groups(groups)
            check_groups(groups, self._recipe.model.max_context)  # every rank finds the same
            batch = StepBatch(
                groups, self._loss.units, mask_truncated=self._settings.mask_truncated
            )
        value_names = self._loss.value_metric_names if isinstance(self._loss, ValueLoss) else ()
        step = StepState(batch, clock, (*self._loss.metric_names, *value_names))
        with clock("reference"):
            step.reference = self._reference_logprobs(batch)
        with clock("old"):
            self._fix_old_logprobs(step)
        if isinstance(self._loss, PreparedLoss):
            with clock("values"):
                values = self._values(batch)
            step.preparation = Preparation(self._loss, batch, step.old, step.reference, values)
        count = self._settings.batching.mini_batches
        for _ in range(self._settings.batching.passes):
            for part in mini_batches(len(batch.groups), count):
                self._update(step, part)
        with clock("metrics"):
            comparable = self._passes.temperature == self._recipe.sampling.temperature
            found = step.metrics(to_behaviour=comparable)
        return found | clock.metrics()

    def snapshot(self, parity_sequences: Sequence[Sequence[int]] = ()) -> Snapshot:
        """Host copies of the trained parameters (rank 0) and the log-probs of the sequences under them.

        Under ZeRO-3 on several ranks each rank has the tensors that it publishes, and none ever has all of them.
        """
        sequences = [list(sequence) for sequence in parity_sequences]
        parity = list(zip(sequences, self.parity_logprobs(sequences), strict=False))
        if self._adapter is not None:
            tensors = self._host_copies(self._engine.parameters())
            named = {lora.saved_name(name): tensor for name, tensor in tensors.items()}
            return Snapshot(named, self._updates, parity, self._adapter.config_json)
        model = self._engine.scorer.model
        if self._shards is not None:
            tensors = self._copies_of_part(self._shards)
            return Snapshot(tensors, self._updates, parity, part=self._shards.part(self._rank))
        tensors = self._host_copies(model.named_parameters())
        if self._rank == 0:
            tensors |= {name: _host_copy(b) for name, b in saved_buffers(model).items()}
            # What transformers renames or fuses when it loads a model, it undoes here.
            tensors = revert_weight_conversion(model, tensors)
        return Snapshot(tensors, self._updates, parity)

    def parity_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence: log pi at temperature 1 of tokens 1 .. n-1, forward pass in the model's dtype."""
        found = broadcast_sequences(sequences)
        return self._passes.sequence_logprobs(self._engine.scorer, found)

    def save(self, folder: Path) -> None:
        """Writes the whole training state to the folder (made if missing), fsynced; rank 0 writes.

        CheckpointError on rank 0 when it can't; the other ranks do not notice, and training can go on.
        """
        try:
            # The critic first: where both can't be written, the policy's file of scalars is missing.
            if self._critic is not None:
                self._critic.save(folder, self._scalars())
        finally:
            try:
                state.save(folder, self._engine, self._scalars())
            finally:
                dist.barrier()

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, by any number of ranks and ZeRO stage. CheckpointError when it does not fit."""
        self._updates = int(state.read(folder, self._engine)["updates"])
        if self._critic is not None:
            self._critic.load(folder)

    def export(self, folder: Path) -> None:
        """Writes a model folder (safetensors, config, tokenizer) that transformers loads; rank 0 writes.

        An adapter is merged into it, and written as it is to the folder's neighbour `adapter`. Under ZeRO-3 on several
        ranks each writes a file with its tensors, to storage that all ranks see.
        """
        snapshot = self.snapshot()
        source, dtype = Path(self._recipe.model.path), self._recipe.model.dtype
        try:
            if snapshot.part is not None:
                self._export_part(snapshot, source, folder)
            elif self._rank == 0:
                tensors, config = snapshot.tensors, snapshot.adapter_config
                if config is not None:
                    lora.write_adapter(tensors, config, folder.parent / "adapter")
                    tensors = lora.merged(source, config, tensors, dtype)
                write_model(tensors, source, folder, dtype)
        except OSError as error:
            raise CheckpointError(
                f"can't write the model to {folder}: {error}; free space or choose another folder"
            ) from error

    def _export_part(self, snapshot: Snapshot, source: Path, folder: Path) -> None:
        from safetensors.torch import save_file

        assert self._shards is not None
        shards, world = self._shards, self._world
        if self._rank == 0:
            write_companions(source, folder, self._recipe.model.dtype)
            files = {tensor.name: shard_name(tensor.owner, world) for tensor in shards.tensors}
            write_index(folder, files, shards.total_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            snapshot.tensors, folder / shard_name(self._rank, world), metadata={"format": "pt"}
        )
        dist.barrier()

    def close(self) -> None:
        """Frees the engine. The process group stays: it lives as long as the process."""
        self._engine.close()
        if self._critic is not None:
            self._critic.close()

    # ---- construction

    def _build_engine(self) -> Engine:
        model = load_policy(self._recipe.model.path, dtype=self._recipe.model.dtype)
        if self._settings.lora is not None:
            self._adapter = lora.add_adapter(
                model,
                self._settings.lora,
                seed=self._recipe.run.seed,
                base=self._recipe.model.path,
                with_start=self._adapter_is_reference,
            )
        if self._settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        shared = isinstance(self._loss, ValueLoss) and self._loss.shares_policy
        scorer = TokenScorer(model, value_head=shared)
        return Engine(scorer, self._settings, self._recipe.model.dtype, self._device)

    def _build_reference(self) -> TokenScorer | None:
        if not self._loss.needs_reference:
            return None
        if self._adapter_is_reference:
            return self._engine.scorer
        folder = self._settings.reference or self._recipe.model.path
        model = load_policy(folder, dtype=self._recipe.model.dtype)
        return TokenScorer(model).to(self._device).eval().requires_grad_(False)

    def _plan_shards(self) -> ShardPlan | None:
        """Who publishes what; None when rank 0 publishes everything."""
        model = self._engine.scorer.model
        # An adapter is small, and rank 0 holds all of it without harm.
        if self._engine.stage < 3 or self._world == 1 or self._adapter is not None:
            return None
        return ShardPlan.of(model, self._world) if is_stored_as_computed(model) else None

    @property
    def _adapter_is_reference(self) -> bool:
        """Whether the reference is the policy's own base, or the adapter that it started with."""
        given = self._settings.reference is not None
        return self._settings.lora is not None and self._loss.needs_reference and not given

    # ---- log-probs that stay fixed during a step

    def _reference_logprobs(self, batch: StepBatch) -> np.ndarray | None:
        if self._reference is None:
            return None
        given = batch.flat_references()
        if given is not None:
            return given
        shared = self._adapter if self._reference is self._engine.scorer else None
        with shared.reference() if shared is not None else nullcontext():
            return self._passes.score(self._reference, batch, batch.used_rows())

    def _values(self, batch: StepBatch) -> np.ndarray | None:
        """The critic's values at the step's start, flat; None for a loss without a critic."""
        if self._critic is not None:
            return self._critic.values(batch, batch.used_rows())
        if isinstance(self._loss, ValueLoss):
            return self._passes.score(self._engine.scorer, batch, batch.used_rows(), VALUES)
        return None

    def _fix_old_logprobs(self, step: StepState) -> None:
        """pi_old for the whole step; with a single update it is the policy of that update itself."""
        batch = step.batch
        if self._settings.old_logprobs == "behaviour":
            step.old = batch.behaviour
        elif self._loss.needs_old and (self._settings.updates_per_step > 1 or self._old_first):
            rows = batch.used_rows()
            step.old = self._passes.score(self._engine.scorer, batch, rows)
            step.note_start(step.old, rows, everywhere=True)

    @property
    def _old_first(self) -> bool:
        return isinstance(self._loss, PreparedLoss) and self._loss.old_first

    # ---- updates

    def _update(self, step: StepState, part: range) -> None:
        """One optimizer update on a mini-batch. Without groups there is none, but the schedule moves on."""
        rate = self._learning_rate()
        if len(part):
            batch = step.batch
            units = [unit for group in part for unit in batch.units[group]]
            if step.preparation is not None:
                units = step.preparation.begin_update(units)
            scale = 1.0 / max(1, self._normaliser(batch, part))
            capacity = self._settings.batching.micro_batch_tokens
            with step.clock("forward_backward"):
                # A single row is the least that a pass can take, whatever its length.
                rows_alone = all(len(unit) == 1 for unit in units)
                if rows_alone or fits(units, batch.total_lengths, capacity):
                    self._accumulate(step, self._passes.share(batch, units), scale)
                else:
                    self._accumulate_apart(step, units, scale)
            with step.clock("optimizer"):
                step.grad_norms.append(self._engine.step(rate))
            if self._critic is not None:
                with step.clock("critic"):
                    self._critic.update(step, units, scale, rate)
        self._updates += 1
        step.learning_rate = rate

    def _accumulate(self, step: StepState, share: Share, scale: float) -> None:
        """Gradient of a mini-batch whose units fit into micro-batches."""
        for number, micro_batch in enumerate(share):
            logprobs_B_T, *values = self._forward(step, micro_batch)
            # What a rank without work has to offer; a value head takes part in it.
            loss = sum((part.sum() for part in values), logprobs_B_T.sum()) * 0.0
            if micro_batch:
                output = self._loss(self._inputs(step, micro_batch, logprobs_B_T))
                loss = output.terms.sum() * scale
                self._count(step, output, scale)
                if values:
                    loss = loss + self._value_loss(step, micro_batch, values[0], scale)
            self._engine.backward(loss, last=number == len(share) - 1)

    def _accumulate_apart(self, step: StepState, units: Sequence[Unit], scale: float) -> None:
        """The same for units larger than a micro-batch, at the price of one more forward pass.

        By the chain rule: first the log-probs of all rows and the loss's gradient by them, then the
        rows one by one, each log-prob weighted with that constant.
        """
        batch, rows = step.batch, rows_in(units)
        logprobs_B_T = batch.padded(self._passes.score(self._engine.scorer, batch, rows), rows)
        logprobs_B_T = logprobs_B_T.to(self._device).requires_grad_()
        output = self._loss(self._inputs(step, list(units), logprobs_B_T))
        (output.terms.sum() * scale).backward()
        assert logprobs_B_T.grad is not None
        if self._rank == 0:
            self._count(step, output, scale)
        weights = flattened(logprobs_B_T.grad, batch, rows)
        share = self._passes.share(batch, [(row,) for row in rows])
        for number, micro_batch in enumerate(share):
            scores_B_T, *_ = self._forward(step, micro_batch)
            loss = scores_B_T.sum() * 0.0
            if micro_batch:
                weights_B_T = batch.padded(weights, rows_in(micro_batch)).to(self._device)
                loss = (scores_B_T * weights_B_T).sum()
            self._engine.backward(loss, last=number == len(share) - 1)

    def _value_loss(
        self, step: StepState, units: MicroBatch, values_B_T: Tensor, scale: float
    ) -> Tensor:
        """The loss of a critic that is a head on the policy."""
        assert isinstance(self._loss, ValueLoss)
        assert step.preparation is not None
        targets = step.preparation.value_targets(rows_in(units), values_B_T)
        output = self._loss.value_terms(values_B_T, *targets)
        step.count(output)
        return output.terms.sum() * scale

    def _forward(self, step: StepState, micro_batch: MicroBatch) -> list[Tensor]:
        """Log-probs and, with a value head, values, (B, T) with gradient.

        Notes entropy and, in the first update, the start's log-probs.
        """
        rows = rows_in(micro_batch)
        batch = step.batch
        arguments = self._passes.arguments(batch, rows)
        logprobs_B_T, entropies_B_T, *values = self._engine.score(*arguments)
        if not rows:
            return [logprobs_B_T, *values]
        mask_B_T = batch.padded(batch.mask, rows).to(self._device)
        total = torch.where(mask_B_T, entropies_B_T, 0.0).sum()
        step.means.add("entropy", float(total), int(mask_B_T.sum()))
        if not step.grad_norms and not step.start_everywhere:
            step.note_start(flattened(logprobs_B_T, batch, rows), rows)
        return [logprobs_B_T, *values]

    def _inputs(self, step: StepState, units: MicroBatch, logprobs_B_T: Tensor) -> LossInputs:
        rows, batch = rows_in(units), step.batch

        def padded(flat: np.ndarray) -> Tensor:
            return batch.padded(flat, rows).to(self._device)

        rewards = torch.from_numpy(batch.rewards[rows]).float()
        advantages, weights = None, None
        if step.preparation is not None:
            advantages, weights = step.preparation.of(units, logprobs_B_T)
        return LossInputs(
            logprobs_B_T=logprobs_B_T,
            old_logprobs_B_T=logprobs_B_T.detach() if step.old is None else padded(step.old),
            behaviour_logprobs_B_T=padded(batch.behaviour),
            reference_logprobs_B_T=None if step.reference is None else padded(step.reference),
            mask_B_T=padded(batch.mask),
            rewards_B=rewards.to(self._device),
            unit_sizes=tuple(len(unit) for unit in units),
            advantages_B_T=advantages,
            weights_B_T=weights,
        )

    def _count(self, step: StepState, output: LossOutput, scale: float) -> None:
        step.means.add("loss", float(output.terms.detach().sum()) * scale, 0)
        step.count(output)

    def _normaliser(self, batch: StepBatch, part: range) -> int:
        if self._loss.normalise_by == "group":
            return len(part)
        if self._loss.normalise_by == "sample":
            return sum(len(batch.rows_of(group)) for group in part)
        return batch.tokens_of(part)

    def _learning_rate(self) -> float:
        total = self._recipe.schedule.steps * self._settings.updates_per_step
        per_step = self._settings.updates_per_step
        return learning_rate(self._updates, total, self._settings.optimizer, per_step)

    # ---- small parts

    def _copies_of_part(self, shards: ShardPlan) -> dict[str, Tensor]:
        """What this rank publishes; every rank takes part in gathering everything, one parameter at a time."""
        model = self._engine.scorer.model
        tensors = shards.allocate(self._rank)
        for name, parameter in model.named_parameters():
            with self._engine.gathered(parameter):
                if name in tensors:
                    tensors[name].copy_(parameter.detach())
        for name, buffer in saved_buffers(model).items():
            if name in tensors:
                tensors[name].copy_(buffer)
        return tensors

    def _host_copies(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Whole parameters by name, on rank 0; nothing elsewhere."""
        tensors = {}
        for name, parameter in parameters:
            with self._engine.gathered(parameter):
                if self._rank == 0:
                    tensors[name] = _host_copy(parameter)
        return tensors

    def _scalars(self) -> dict[str, Any]:
        return {
            "updates": self._updates,
            "ranks": self._world,
            "zero_stage": self._engine.stage,
            "device": self._device.type,
            "seed": self._recipe.run.seed,
        }


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
