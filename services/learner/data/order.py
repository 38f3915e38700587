"""Which prompt an ordinal gets. Pure functions of seed and ordinal, so that a resumed run goes on as it would have.

Used by `dataset`.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction

from offbeat.errors import DataError

EPOCHS_KEPT = 4
"""Permutations that are remembered: ordinals come in order but for those that are issued again."""


class EpochOrder:
    """The order of one source's rows: each epoch is a permutation that depends on the seed and the epoch alone."""

    def __init__(self, rows: int, *, seed: str, shuffle: bool) -> None:
        if rows < 1:
            raise DataError(
                "the training data has no usable prompts; see the counts of dropped ones in the log"
            )
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._kept: OrderedDict[int, list[int]] = OrderedDict()

    def row(self, index: int) -> int:
        """The row of the source's prompt number `index`, counted from 0 over all epochs."""
        epoch, place = divmod(index, self._rows)
        return self._permutation(epoch)[place] if self._shuffle else place

    def _permutation(self, epoch: int) -> list[int]:
        if epoch not in self._kept:
            order = list(range(self._rows))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._kept[epoch] = order
            if len(self._kept) > EPOCHS_KEPT:
                self._kept.popitem(last=False)
        return self._kept[epoch]


class Shares:
    """Spreads ordinals over parts evenly: of the first n, a part with share s has n × s, give or take less than the
    number of parts; so of any stretch, give or take twice that.

    The first part takes ordinal n where floor(n × s) makes a step; what it leaves is shared out among the others in
    the same way. So the part of an ordinal, and how many of that part came before it, need no history.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        left = [sum(exact[index:], Fraction(0)) for index in range(len(exact))]
        shares = [weight / rest for weight, rest in zip(exact, left, strict=True)]
        self._shares = [(share.numerator, share.denominator) for share in shares]

    def part(self, ordinal: int) -> tuple[int, int]:
        """The part of an ordinal, and how many smaller ordinals have the same part."""
        for index, (numerator, denominator) in enumerate(self._shares):
            before = ordinal * numerator // denominator
            if (ordinal + 1) * numerator // denominator > before:
                return index, before
            ordinal -= before
        raise AssertionError("the last part takes what is left")


class MixtureOrder:
    """The order of several sources, each of which runs through epochs of its own."""

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool
    ) -> None:
        self._shares = Shares(weights)
        # Parts of one size must not be shuffled alike; the first has the order that it has alone.
        seeds = [f"{seed}" if part == 0 else f"{seed}:{part}" for part in range(len(sizes))]
        self._orders = [
            EpochOrder(size, seed=text, shuffle=shuffle)
            for size, text in zip(sizes, seeds, strict=True)
        ]

    def row(self, ordinal: int) -> tuple[int, int]:
        """The part of an ordinal, and the row in it."""
        part, index = self._shares.part(ordinal)
        return part, self._orders[part].row(index)


def interleave(sizes: Sequence[int], weights: Sequence[float]) -> list[tuple[int, int]]:
    """All rows of all parts once, as (part, row): each beginning holds the parts by their weights while they last."""
    places = [(part, row) for part, size in enumerate(sizes) for row in range(size)]
    return sorted(places, key=lambda place: ((place[1] + 0.5) / weights[place[0]], place[0]))
