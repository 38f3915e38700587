"""docs/scaling.md: its tables are what the model prints, and the model's costs are those that were measured."""

import math
from pathlib import Path

import pytest

from benchmarks.scaling import GPUS, PER_NODE, WORKLOADS, Measured, Plan, between, tables

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()


@pytest.mark.parametrize("name", ["balance", "limits", "weights"])
def test_the_page_has_the_tables_of_the_model(name: str) -> None:
    assert tables()[name] in PAGE, "run python -m benchmarks.scaling, and put its tables there"


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.name)
def test_a_plan_uses_its_gpus_and_is_in_balance(work, gpus: int) -> None:
    plan = Plan(work, gpus)
    used = plan.learner_gpus + plan.generators * work.generator_gpus
    assert gpus - max(PER_NODE, work.generator_gpus) < used <= gpus
    made = plan.generators * work.generator_tokens_s
    taken = plan.learner_gpus * work.learner_gpu_tokens_s
    if gpus > 64:  # whole nodes are a small part of it
        assert math.isclose(made, taken, rel_tol=0.1)


def test_costs_between_sizes_lie_between_the_costs() -> None:
    known = Measured()
    for size, cost in zip(known.group_kb, known.redis_ms, strict=True):
        assert math.isclose(between(size, known.group_kb, known.redis_ms), cost)
    assert 0.153 < between(20.0, known.group_kb, known.redis_ms) < 0.587
