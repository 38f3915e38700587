"""What a worker believes to hold, without a server."""

import time

from offbeat.streams.base import Delivery, Stream
from offbeat.streams.holdings import Holdings
from tests.harness.streams import make_task


def delivery(number: int, *, alone: bool = False) -> Delivery:
    return Delivery(Stream.PROMPTS, f"{number}-0", make_task(number), alone=alone)


def test_what_moves_on_during_a_heartbeat_is_not_lost() -> None:
    one, two, three = delivery(1), delivery(2), delivery(3)
    holdings = Holdings(max_hold_seconds=60)
    holdings.add([one, two, three])
    holdings.forget([one.key])  # handed off while the heartbeat was under way
    with holdings.leaving([two.key]):
        assert holdings.lose([], [one.key, two.key, three.key]) == {three.key}
    assert holdings.keys == [two.key]
    assert holdings.lose([], [two.key]) == {two.key}


def test_what_was_never_held_is_lost() -> None:
    holdings = Holdings(max_hold_seconds=60)
    assert holdings.lose([delivery(1).key], []) == {delivery(1).key}


def test_an_entry_runs_alone_until_it_is_forgotten() -> None:
    only = delivery(1, alone=True)
    holdings = Holdings(max_hold_seconds=60)
    assert not holdings.alone
    holdings.add([only])
    assert holdings.alone
    holdings.forget([only.key])
    assert not holdings.alone
    assert not holdings.handled(only.key)


def test_nothing_counts_as_held_for_ever() -> None:
    only = delivery(1, alone=True)
    holdings = Holdings(max_hold_seconds=0.001)
    holdings.add([only])
    time.sleep(0.002)
    assert holdings.keys == []
    assert not holdings.alone
    assert holdings.handled(only.key)
    holdings.lose([only.key], [])
    assert holdings.handled(only.key)
    holdings.add([only])
    holdings.forget([only.key])
    assert not holdings.handled(only.key)
