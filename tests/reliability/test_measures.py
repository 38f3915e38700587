"""The measures of a soak find what they are for."""

import random

from tests.reliability.memory import growth
from tests.reliability.results import quantile
from tests.reliability.soak import WINDOW_SECONDS, windows


def processes(slope: float, noise: float) -> dict[int, list[tuple[float, float]]]:
    """Three processes of different sizes, sampled for ten minutes; `slope` in MiB per hour."""
    chance = random.Random(1)
    return {
        pid: [(t, 100 * pid + slope * t / 3600 + chance.gauss(0, noise)) for t in range(0, 600, 4)]
        for pid in (1, 2, 3)
    }


def test_memory_that_grows_is_shown_to():
    found = growth(processes(slope=60.0, noise=1.0))
    assert found.low < 60.0 < found.high
    assert found.shown(0.05)
    assert (found.processes, found.samples) == (3, 450)


def test_levels_of_several_processes_are_no_growth():
    found = growth(processes(slope=0.0, noise=1.0))
    assert found.low < 0.0 < found.high or abs(found.slope_mib_per_hour) < 3.0
    assert not found.shown(0.05)


def test_too_few_samples_say_nothing():
    assert growth({1: [(0.0, 1.0)] * 5}) is None


def test_windows_touch_no_trouble():
    troubled = [(12.0, 14.0), (13.0, 21.0), (40.0, 41.0)]
    starts = list(windows(0.0, 50.0, troubled))
    assert starts == [0.0, 5.0, 21.0, 26.0, 31.0, 41.0]
    for start in starts:
        assert all(to <= start or frm >= start + WINDOW_SECONDS for frm, to in troubled)


def test_quantiles_are_values_that_were_seen():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(range(100), 0.95) == 95
    assert quantile([7.0], 0.95) == 7.0
