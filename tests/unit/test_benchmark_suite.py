"""What the benchmarks do with what they measured, and whether the emulated engine does what it stands for."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.suite.cells import (
    AT_LEAST,
    AT_MOST,
    Cell,
    CellFolder,
    Row,
    read_results,
    write_results,
)
from benchmarks.suite.emulated.devices import Devices
from benchmarks.suite.emulated.generator import SleepingEngine
from benchmarks.suite.measure import alternate
from benchmarks.suite.overlap import Balance
from benchmarks.suite.runs import RunResult
from benchmarks.suite.table import page
from offbeat.config.recipe import ModelSettings
from offbeat.v1 import checkpoint_pb2 as checkpoint
from offbeat.weights.staged import StagedWeights
from services.generator.engines.base import GenerationRequest

CIRCUMSTANCES = {"commit": "abc", "date": "today", "cores": [0, 1], "load": 0.5}


def _cell(*values: float) -> Cell:
    rows = [Row("ratio", list(values), "x", (AT_LEAST, 0.97)), Row("seconds", [2.0], "s")]
    return Cell("a", "2M", rows, 3.0, CIRCUMSTANCES)


@pytest.mark.parametrize(
    ("values", "target", "met"),
    [
        ([1.0, 0.9, 0.98], (AT_LEAST, 0.97), True),
        ([0.9, 0.96, 1.2], (AT_LEAST, 0.97), False),
        ([1.05], (AT_MOST, 1.05), True),
        ([1.06], (AT_MOST, 1.05), False),
        ([1.06], None, None),
    ],
)
def test_the_median_meets_a_target_or_not(values, target, met):
    assert Row("what", values, "x", target).met is met


def test_cells_and_results_come_back_as_they_were(tmp_path: Path) -> None:
    folder, cell = CellFolder(tmp_path), _cell(1.0, 0.5)
    assert folder.read(cell.key) is None
    folder.write(cell)
    assert folder.read(cell.key) == cell
    write_results(tmp_path / "all.json", [cell], "make bench")
    assert read_results(tmp_path / "all.json") == {"a/2M": cell}
    assert read_results(tmp_path / "none.json") == {}


def test_the_page_tells_spread_target_and_what_stood_there_before() -> None:
    text = page([_cell(1.0, 0.5, 0.9)], {"a/2M": _cell(0.8)}, "make bench")
    line = next(line for line in text.splitlines() if "ratio" in line)
    assert line == "| 2M | ratio | 0.9 × | 0.5 … 1 | 3 | >= 0.97: not met | 0.8 |"
    assert "commit abc, today, load 0.5, cores 0,1" in text


def test_contenders_take_turns_in_changing_order_and_warm_up_first() -> None:
    calls: list[str] = []
    found = alternate(
        2, {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}
    )
    assert "".join(calls) == "baabba"
    assert found == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_no_schedule_is_faster_than_the_limit() -> None:
    balance = Balance("", generate=1.0, score=0.5, train=0.7)
    limits = [balance.limit(lag) for lag in (0, 1, 2, 8)]
    assert limits == pytest.approx([2.2, 1.1, 1.0, 1.0])


def test_steps_that_take_turns_are_averaged_over_a_cycle() -> None:
    steps = [{"time/step_seconds": seconds} for seconds in (9.0, 1.0, 2.0, 1.0, 2.0, 1.0, 9.0, 9.0)]
    result = RunResult(Path(), 0.0, steps, [])
    assert result.cycle_seconds(skip=1, cycle=2) == [1.5] * 4


async def test_the_emulated_engine_stands_still_while_weights_are_loaded(tmp_path: Path) -> None:
    engine = SleepingEngine(
        Devices(slots=1, decode_seconds=0.01, load_seconds=0.1), ModelSettings(path="none")
    )

    def staged(version: int) -> StagedWeights:
        (tmp_path / str(version)).write_bytes(b"weights")
        return StagedWeights(tmp_path / str(version), checkpoint.Manifest(version=version))

    await engine.load_weights(staged(1), 1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    running = asyncio.create_task(engine.generate(GenerationRequest("a", [3], max_tokens=20)))
    await asyncio.sleep(0.1)
    await engine.load_weights(staged(2), 2)
    done = await running
    assert loop.time() - began >= 0.3
    assert [version for version, _ in done.version_spans] == [1, 2]
    assert sum(count for _, count in done.version_spans) == len(done.token_ids) == 20


def test_devices_travel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(slots=3, train_seconds=0.5)
    for name, value in devices.environment().items():
        assert json.loads(value)["slots"] == 3
        monkeypatch.setenv(name, value)
    assert Devices.here() == devices
