"""Held-out evaluation: tasks of one version, results that count every prompt."""

import math

import pytest

from offbeat.v1 import samples_pb2 as samples
from services.learner.data.prompts import Prompt
from services.learner.evaluation import Evaluator, wilson


@pytest.fixture
def evaluator(recipe):
    prompts = [Prompt(f"{i}", [i + 1], {}) for i in range(10)]
    changed = recipe.model_copy(
        update={"evaluation": recipe.evaluation.model_copy(update={"prompts": 4, "k": 2})}
    )
    return Evaluator(changed, prompts)


def scored(task: samples.PromptTask, *totals: float, version: int = 1) -> samples.ScoredRollout:
    span = samples.VersionSpan(version=version, count=1)
    completions = [samples.Completion(token_ids=[1], version_spans=[span]) for _ in totals]
    rollout = samples.Rollout(task=task, completions=completions)
    return samples.ScoredRollout(
        rollout=rollout, scores=[samples.CompletionScore(total=t) for t in totals]
    )


def test_tasks_belong_to_one_version(evaluator):
    tasks = evaluator.start(step=3, version=9, term=2, whole=True)
    assert len(tasks) == 8
    assert {(task.min_version, task.max_version) for task in tasks} == {(9, 9)}
    greedy = [task for task in tasks if task.evaluation_id == "greedy-3-9"]
    assert {(task.k, task.sampling.temperature) for task in greedy} == {(1, 0.0)}
    assert all(len(task.seeds) == task.k == 2 for task in tasks if task not in greedy)


def test_results_count_dead_prompts_as_not_passed(evaluator):
    sampled = [
        task for task in evaluator.start(step=0, version=1, term=1, whole=True) if task.k == 2
    ]
    assert evaluator.add(scored(sampled[0], 1, 0)) is None
    assert evaluator.add(scored(sampled[0], 0, 0)) is None, "the first result wins"
    assert evaluator.add(scored(sampled[1], 1, 1)) is None
    assert evaluator.add(scored(sampled[2], 0, 0)) is None
    done = evaluator.add_dead(sampled[3].evaluation_id, sampled[3].ordinal)
    metrics = done.metrics(threshold=1.0)
    assert metrics["eval/sampled/pass@1"] == pytest.approx(3 / 8)
    assert metrics["eval/sampled/pass@2"] == pytest.approx(2 / 4)
    assert metrics["eval/sampled/dead"] == 1
    assert metrics["eval/sampled/reward"] == pytest.approx(0.5)
    half = metrics["eval/sampled/reward_high"] - 0.5
    assert half == pytest.approx(1.96 * 0.5 / math.sqrt(3)), "of the three prompts' means 0.5, 1, 0"
    assert metrics["eval/sampled/reward_low"] == pytest.approx(0.5 - half)


def test_unanswered_tasks_are_known(evaluator):
    tasks = evaluator.start(step=0, version=1, term=1, whole=True)
    evaluator.add(scored(tasks[0], 1))
    assert tasks[0] not in evaluator.pending[0].unanswered
    assert len(evaluator.pending[0].unanswered) == 3


def test_wilson_interval_against_known_values():
    low, high = wilson(0.5, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)
    assert wilson(0.0, 10)[0] == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(wilson(0.5, 0)[0])


def test_answers_of_another_version_are_counted(evaluator):
    tasks = [task for task in evaluator.start(step=0, version=1, term=1, whole=True) if task.k == 1]
    done = [
        evaluator.add(scored(task, 1.0, version=2 if task is tasks[0] else 1)) for task in tasks
    ]
    assert done[-1].metrics(1.0)["eval/greedy/other_version"] == 1
