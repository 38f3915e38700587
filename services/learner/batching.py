"""How a step's groups are cut into mini-batches, shares of ranks, and micro-batches. Pure; no I/O.

The trainer uses it. A **unit** is what the loss needs in one forward pass (a pair for online DPO, a
group for RLOO). A unit is never spread over ranks or micro-batches, so a loss is a sum over units,
and neither its value nor its gradient depends on how the units are cut.

Rows are the completions of a step, counted from 0 over all groups in ordinal order. What is known
per token (log-probs, masks) lies in flat arrays, row after row, without padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import DataError

# A unit as row numbers; a micro-batch as units; a share as the micro-batches of one rank.
Unit = tuple[int, ...]
MicroBatch = list[Unit]
Share = list[MicroBatch]


@dataclass(frozen=True, eq=False)
class Sample:
    """One scored completion.

    `token_ids` int32 (T,), the end-of-sequence token included; `behaviour_logprobs` float32 (T,),
    log mu at the sampling temperature; `lag`: steps between the learner and the weights of the
    oldest token; `loss_mask` bool (T,), None: all tokens are trained on; `reference_logprobs`
    float32 (T,), None: the trainer computes them.
    """

    token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    reward: float
    has_eos: bool
    lag: int = 0
    loss_mask: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Group:
    """The completions of one prompt. `prompt_token_ids` is int32 (P,), P >= 1."""

    ordinal: int
    prompt_token_ids: np.ndarray
    completions: tuple[Sample, ...]


def check_groups(groups: Sequence[Group], max_context: int) -> None:
    """DataError for a group that can't be trained on: an empty, overlong or ill-shaped part, NaN."""
    for group in groups:
        where = f"ordinal {group.ordinal}"
        if not len(group.prompt_token_ids) or not group.completions:
            raise DataError(f"{where}: expected a prompt and completions, found an empty one")
        for index, sample in enumerate(group.completions):
            _check_sample(sample, f"{where}, completion {index}")
            total = len(group.prompt_token_ids) + len(sample.token_ids)
            if total > max_context:
                raise DataError(
                    f"{where}, completion {index}: prompt and completion have {total} tokens, "
                    f"model.max_context is {max_context}: raise it, or lower sampling.max_tokens"
                )


def _check_sample(sample: Sample, where: str) -> None:
    length = len(sample.token_ids)
    if not length:
        raise DataError(f"{where}: expected at least one token, found none")
    per_token = {
        "behaviour_logprobs": sample.behaviour_logprobs,
        "reference_logprobs": sample.reference_logprobs,
        "loss_mask": sample.loss_mask,
    }
    for name, values in per_token.items():
        if values is not None and (len(values) != length or not np.isfinite(values).all()):
            raise DataError(f"{where}: expected {length} finite {name}, found {values!r}")
    if not np.isfinite(sample.reward):
        raise DataError(f"{where}: expected a finite reward, found {sample.reward}")


class StepBatch:
    """A step's groups as rows and flat arrays; see the module's docstring.

    `rewards` float64 (rows,), `lags` int64 (rows,), `lengths` and `prompt_lengths` int64 (rows,);
    flat: `behaviour` float32, `mask` bool. `units[g]` are the units of group g. With `mask_truncated`
    no token of a completion without an end is trained on.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        units_of: Callable[[np.ndarray], Sequence[Unit]],
        *,
        mask_truncated: bool = False,
    ) -> None:
        self.groups = sorted(groups, key=lambda group: group.ordinal)
        self.samples = [sample for group in self.groups for sample in group.completions]
        self._prompts = [g.prompt_token_ids for g in self.groups for _ in g.completions]
        self.lengths = np.array([len(s.token_ids) for s in self.samples], np.int64)
        self.prompt_lengths = np.array([len(p) for p in self._prompts], np.int64)
        self.rewards = np.array([s.reward for s in self.samples], np.float64)
        self.lags = np.array([s.lag for s in self.samples], np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.behaviour = self._flat([s.behaviour_logprobs for s in self.samples], np.float32)
        self.mask = self._flat([_mask(s, mask_truncated) for s in self.samples], np.bool_)
        self.units = self._units(units_of)

    @property
    def total_lengths(self) -> np.ndarray:
        """Tokens of prompt and completion of each row."""
        return self.prompt_lengths + self.lengths

    def tokens_of(self, groups: range) -> int:
        """Number of trained tokens of the groups."""
        rows = [row for group in groups for row in self.rows_of(group)]
        return (
            int(self.mask[self.offsets[rows[0]] : self.offsets[rows[-1] + 1]].sum()) if rows else 0
        )

    def rows_of(self, group: int) -> range:
        """The rows of a group."""
        return self._rows[group]

    def used_rows(self) -> list[int]:
        """Rows that are run through the model."""
        return sorted({row for units in self.units for unit in units for row in unit})

    def flat_index(self, rows: Iterable[int]) -> np.ndarray:
        """Places of the rows' tokens in the flat arrays, row after row."""
        spans = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def flat_references(self) -> np.ndarray | None:
        """Reference log-probs that came with the samples, flat; None unless all of them have some."""
        given = [s.reference_logprobs for s in self.samples if s.reference_logprobs is not None]
        return self._flat(given, np.float32) if len(given) == len(self.samples) else None

    def collate(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, int]:
        """The arguments of `TokenScorer`: padded tokens, prompt and completion lengths, shortest prompt."""
        index = np.asarray(rows)
        tokens = np.zeros((len(rows), int(self.total_lengths[index].max())), np.int64)
        for line, row in enumerate(rows):
            prompt, completion = self._prompts[row], self.samples[row].token_ids
            tokens[line, : len(prompt)] = prompt
            tokens[line, len(prompt) : len(prompt) + len(completion)] = completion
        prompts = torch.from_numpy(self.prompt_lengths[index])
        completions = torch.from_numpy(self.lengths[index])
        return torch.from_numpy(tokens), prompts, completions, int(prompts.min())

    def padded(self, flat: np.ndarray, rows: Sequence[int]) -> Tensor:
        """A flat array's values for the rows, right-padded with 0 (False)."""
        lengths = self.lengths[np.asarray(rows)]
        inside = np.arange(int(lengths.max())) < lengths[:, None]
        values = np.zeros(inside.shape, flat.dtype)
        values[inside] = flat[self.flat_index(rows)]
        return torch.from_numpy(values)

    def row_sums(self, flat: np.ndarray) -> np.ndarray:
        """Sum over each row's trained tokens, float64 (rows,)."""
        if not len(self.samples):
            return np.zeros(0)
        return np.add.reduceat(np.where(self.mask, flat.astype(np.float64), 0.0), self.offsets[:-1])

    def _flat(self, parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        return np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype, copy=False)

    def _units(self, units_of: Callable[[np.ndarray], Sequence[Unit]]) -> list[list[Unit]]:
        ends = np.cumsum([len(group.completions) for group in self.groups], dtype=np.int64)
        self._rows = [
            range(int(end) - len(group.completions), int(end))
            for end, group in zip(ends, self.groups, strict=True)
        ]
        return [
            [
                tuple(rows[k] for k in unit)
                for unit in units_of(self.rewards[rows.start : rows.stop])
            ]
            for rows in self._rows
        ]


def flattened(values_B_T: Tensor, batch: StepBatch, rows: Sequence[int]) -> np.ndarray:
    """Per-token values of the rows in a flat array, 0 elsewhere."""
    flat = np.zeros(len(batch.behaviour), np.float32)
    if rows:
        values = values_B_T.detach().cpu().numpy()
        inside = np.arange(values.shape[1]) < batch.lengths[list(rows)][:, None]
        flat[batch.flat_index(rows)] = values[inside]
    return flat


def _mask(sample: Sample, mask_truncated: bool) -> np.ndarray:
    if mask_truncated and not sample.has_eos:
        return np.zeros(len(sample.token_ids), np.bool_)
    if sample.loss_mask is None:
        return np.ones(len(sample.token_ids), np.bool_)
    return sample.loss_mask.astype(np.bool_)


def mini_batches(count: int, parts: int) -> list[range]:
    """Cuts `count` groups into `parts` contiguous slices whose sizes differ by at most 1.

    Some are empty when there are fewer groups than parts.
    """
    edges = [count * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def shares(
    units: Sequence[Unit], lengths: np.ndarray, *, world: int, max_tokens: int, bucket: bool
) -> list[Share]:
    """Every rank's micro-batches, as many for each rank (at least 1), the last ones possibly empty.

    `lengths`: tokens of each row. A micro-batch has at most `max_tokens` tokens, padding included;
    a unit that is larger is alone in its micro-batch. With `bucket`, units of like length stand
    together.
    """
    widths = {unit: max(int(lengths[row]) for row in unit) for unit in units}
    if bucket:
        # Stable sort: equal widths keep their order, so every rank computes the same plan.
        ordered = sorted(units, key=lambda unit: -widths[unit])
        dealt = [ordered[rank::world] for rank in range(world)]
    else:
        dealt = [[units[i] for i in part] for part in mini_batches(len(units), world)]
    cut = [_micro_batches(share, widths, max_tokens, bucket) for share in dealt]
    most = max(1, *(len(share) for share in cut))
    return [share + [[] for _ in range(most - len(share))] for share in cut]


def _micro_batches(
    units: Sequence[Unit], widths: dict[Unit, int], max_tokens: int, bucket: bool
) -> Share:
    done: Share = []
    rows, width = 0, 0
    for unit in units:
        tokens = rows * width
        # Sorted by length, a cut here saves more padding than one more forward pass costs.
        much_shorter = bucket and widths[unit] < 0.75 * width and tokens > max_tokens // 8
        rows, width = rows + len(unit), max(width, widths[unit])
        if not done or much_shorter or rows * width > max_tokens:
            done.append([])
            rows, width = len(unit), widths[unit]
        done[-1].append(unit)
    return done


def rows_in(units: Sequence[Unit]) -> list[int]:
    """The rows of units, in their order."""
    return [row for unit in units for row in unit]


def fits(units: Sequence[Unit], lengths: np.ndarray, max_tokens: int) -> bool:
    """Whether each unit alone fits into a micro-batch."""
    return all(len(unit) * max(lengths[row] for row in unit) <= max_tokens for unit in units)


# The wire form between ranks: five arrays of fixed dtypes.
WIRE_DTYPES = (np.int64, np.float64, np.int32, np.float32, np.uint8)


def pack(groups: Sequence[Group]) -> list[np.ndarray]:
    """Groups as arrays of WIRE_DTYPES: shape numbers, rewards, tokens, log-probs, masks."""
    numbers, rewards = [len(groups)], []
    tokens, floats, masks = [], [], []
    for group in groups:
        numbers += [group.ordinal, len(group.prompt_token_ids), len(group.completions)]
        tokens.append(group.prompt_token_ids)
        for sample in group.completions:
            mask, reference = sample.loss_mask, sample.reference_logprobs
            numbers += [len(sample.token_ids), sample.has_eos, sample.lag]
            numbers += [mask is not None, reference is not None]
            rewards.append(sample.reward)
            tokens.append(sample.token_ids)
            floats.append(sample.behaviour_logprobs)
            floats += [] if reference is None else [reference]
            masks += [] if mask is None else [mask]
    parts: tuple[Sequence[Any], ...] = ([numbers], [rewards], tokens, floats, masks)
    return [
        np.concatenate([np.zeros(0, dtype), *part]).astype(dtype)
        for part, dtype in zip(parts, WIRE_DTYPES, strict=True)
    ]


def unpack(arrays: Sequence[np.ndarray]) -> list[Group]:
    """The inverse of `pack`."""
    reader = _Reader(arrays)
    return [reader.group() for _ in range(reader.number())]


class _Reader:
    """Takes the arrays of `pack` apart, front to back."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays
        self._places = [0] * len(arrays)

    def take(self, array: int, count: int) -> np.ndarray:
        start = self._places[array]
        self._places[array] += count
        return self._arrays[array][start : start + count]

    def number(self) -> int:
        return int(self.take(0, 1)[0])

    def group(self) -> Group:
        ordinal, prompt, count = (self.number() for _ in range(3))
        prompt_token_ids = self.take(2, prompt)
        return Group(ordinal, prompt_token_ids, tuple(self.sample() for _ in range(count)))

    def sample(self) -> Sample:
        length, has_eos, lag, has_mask, has_reference = (self.number() for _ in range(5))
        return Sample(
            token_ids=self.take(2, length),
            behaviour_logprobs=self.take(3, length),
            reward=float(self.take(1, 1)[0]),
            has_eos=bool(has_eos),
            lag=lag,
            reference_logprobs=self.take(3, length) if has_reference else None,
            loss_mask=self.take(4, length).astype(np.bool_) if has_mask else None,
        )
