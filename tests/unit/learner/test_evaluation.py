"""Held-out evaluation: tasks of one version, results that count every prompt."""

import math
import statistics

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


def with_components(task: samples.PromptTask, **values: float | None) -> samples.ScoredRollout:
    record = scored(task, 0.5)
    for name, value in values.items():
        record.scores[0].components.append(samples.ScoreComponent(name=name, value=value))
    return record


def test_each_reward_function_has_its_mean_and_interval(evaluator):
    tasks = evaluator.start(step=3, version=1, term=2, whole=True)
    greedy = [task for task in tasks if task.evaluation_id == "greedy-3-1"]
    values = [1.0, 2.0, 3.0, 6.0]
    for task, value in zip(greedy, values, strict=True):
        late = -1.0 if value == 2.0 else None
        finished = evaluator.add(with_components(task, gold=value, late=late))
    metrics = finished.metrics(1.0)
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    assert metrics["eval/greedy/component/gold"] == 3.0
    assert metrics["eval/greedy/component/gold_low"] == pytest.approx(3.0 - half)
    assert metrics["eval/greedy/component/gold_high"] == pytest.approx(3.0 + half)
    assert metrics["eval/greedy/component/late"] == -1.0, "only where it has a value"


def test_completions_of_a_prompt_are_not_independent(evaluator):
    tasks = evaluator.start(step=3, version=1, term=2, whole=True)
    sampled = [task for task in tasks if task.evaluation_id == "sampled-3-1"]
    for task, value in zip(sampled, [0.0, 0.0, 4.0, 4.0], strict=True):
        finished = evaluator.add(scored(task, value, value))
    metrics = finished.metrics(1.0)
    half = 1.96 * statistics.stdev([0.0, 0.0, 4.0, 4.0]) / 2
    assert metrics["eval/sampled/reward_high"] == pytest.approx(2.0 + half)


def test_without_a_threshold_nothing_passes_or_fails(evaluator):
    tasks = evaluator.start(step=3, version=1, term=2, whole=True)
    for task in tasks:
        if task.evaluation_id == "greedy-3-1":
            finished = evaluator.add(scored(task, 0.25))
    metrics = finished.metrics(None)
    assert metrics["eval/greedy/reward"] == 0.25
    assert metrics["eval/greedy/prompts"] == 4
    assert not [name for name in metrics if "pass" in name]
