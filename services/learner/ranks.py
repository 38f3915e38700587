"""Rank 0's hold on the other ranks: it announces each collective call before all ranks make it together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist

from services.learner.batching import Group
from services.learner.part_publisher import PartOrder, PartPublisher
from services.learner.snapshot import Snapshot
from services.learner.trainer import Trainer


class Command(IntEnum):
    """What all ranks do next."""

    STAY_AWAKE = 0
    TRAIN_STEP = 1
    SNAPSHOT = 2
    SAVE = 3
    EXPORT = 4
    END = 5


class Ranks:
    """The trainer of all ranks, as rank 0 sees it. With one rank nothing is announced."""

    def __init__(self, trainer: Trainer, world: int) -> None:
        self._trainer = trainer
        self._world = world
        self._inside = False

    def tell_parts(self, on_part: Callable[[str], None]) -> None:
        """Has `on_part` told of each part of a step as it begins on rank 0."""
        self._trainer.on_part = on_part

    def _announce(self, command: Command, text: str = "") -> None:
        if self._world > 1:
            encoded = text.encode()
            dist.broadcast(torch.tensor([command, len(encoded)], dtype=torch.int64), src=0)
            if encoded:
                dist.broadcast(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), src=0)

    @contextmanager
    def _together(self, command: Command, text: str = "") -> Iterator[None]:
        self._announce(command, text)
        self._inside = True
        yield
        self._inside = False  # not after an error: see `end`

    def train_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """See `Trainer.train_step`."""
        with self._together(Command.TRAIN_STEP):
            return self._trainer.train_step(groups)

    def snapshot(self, parity_sequences: Sequence[Sequence[int]], order: PartOrder) -> Snapshot:
        """See `Trainer.snapshot`. Where it is only rank 0's part, the other ranks begin to publish theirs."""
        with self._together(Command.SNAPSHOT, order.dump()):
            return self._trainer.snapshot(parity_sequences)

    def save(self, folder: Path) -> None:
        """See `Trainer.save`."""
        with self._together(Command.SAVE, str(folder)):
            self._trainer.save(folder)

    def export(self, folder: Path) -> None:
        """See `Trainer.export`."""
        with self._together(Command.EXPORT, str(folder)):
            self._trainer.export(folder)

    def stay_awake(self) -> None:
        """Keeps the others from running into the collective's time limit while rank 0 waits for groups."""
        self._announce(Command.STAY_AWAKE)

    def end(self) -> None:
        """Lets the other ranks return from `follow`.

        After an error inside a collective call the others sit in that call; another broadcast would hang with them.
        They end when this process does, by its closed connections.
        """
        if not self._inside:
            self._announce(Command.END)


def follow(trainer: Trainer, publisher: PartPublisher) -> None:
    """The life of a rank other than 0: does what rank 0 announces until it says END."""
    while True:
        publisher.check()
        head = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(head, src=0)
        command, length = Command(int(head[0])), int(head[1])
        text = torch.zeros(length, dtype=torch.uint8)
        if length:
            dist.broadcast(text, src=0)
        argument = bytes(text.tolist()).decode()
        match command:
            case Command.TRAIN_STEP:
                trainer.train_step([])
            case Command.SNAPSHOT:
                publisher.publish(trainer.snapshot(), PartOrder.parse(argument))
            case Command.SAVE:
                trainer.save(Path(argument))
            case Command.EXPORT:
                trainer.export(Path(argument))
            case Command.END:
                return
            case Command.STAY_AWAKE:
                pass
