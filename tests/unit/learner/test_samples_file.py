"""samples.jsonl: a bounded, repeatable part of the completions."""

from itertools import pairwise

from offbeat.config.service import SamplesSettings
from offbeat.v1 import samples_pb2 as samples
from services.learner.samples_file import SamplesFile, chosen, cut, read_rows, rows_of


def scored(text="4 + 4", ordinal=3):
    completions = [
        samples.Completion(
            token_ids=[1, 2, 3],
            version_spans=[
                samples.VersionSpan(version=7, count=1),
                samples.VersionSpan(version=8, count=2),
            ],
            finish_reason=reason,
            text=f"{text} = {index}",
        )
        for index, reason in enumerate((samples.FINISH_REASON_STOP, samples.FINISH_REASON_LENGTH))
    ]
    scores = [
        samples.CompletionScore(
            total=index / 2,
            components=[
                samples.ScoreComponent(name="exact", value=index / 2),
                samples.ScoreComponent(name="judge"),
            ],
        )
        for index in range(2)
    ]
    task = samples.PromptTask(ordinal=ordinal, prompt_text=text)
    return samples.ScoredRollout(
        rollout=samples.Rollout(task=task, completions=completions), scores=scores
    )


def train_rows(step, text="4 + 4"):
    return rows_of(
        scored(text), max_characters=100, lags=[1, 0], kind="train", mode="", step=step, term=1
    )


def test_a_row_says_where_a_completion_comes_from():
    first, second = train_rows(5)
    assert first | {"time": 0} == {
        **{"kind": "train", "mode": "", "step": 5, "term": 1, "time": 0},
        **{"version": 7, "newest_version": 8, "lag": 1, "ordinal": 3, "index": 0},
        **{"prompt": "4 + 4", "completion": "4 + 4 = 0", "reward": 0.0},
        **{"components": {"exact": 0.0, "judge": None}, "finish_reason": "stop", "tokens": 3},
    }
    assert (second["lag"], second["finish_reason"], second["reward"]) == (0, "length", 0.5)


def test_the_choice_depends_on_seed_and_step_alone():
    groups = list(range(32))
    assert chosen(groups, 4, seed=1, step=2) == chosen(groups, 4, seed=1, step=2)
    assert len({tuple(chosen(groups, 4, seed=1, step=step)) for step in range(20)}) > 10
    assert chosen(groups, 40, seed=1, step=2) == groups
    assert chosen(groups, 0, seed=1, step=2) == []


def test_long_texts_are_cut():
    assert cut("abc", 3) == "abc"
    assert cut("abcde", 3) == "abc… [2 more]"


def test_a_file_past_its_bound_is_thinned_out_evenly(tmp_path):
    file = SamplesFile(tmp_path, SamplesSettings(max_mb=1, evaluation_prompts=8))
    text = "é" * 1000
    evaluated = [scored(text, ordinal) for ordinal in range(8)]
    rows = [
        row
        for group in evaluated
        for row in rows_of(
            group, max_characters=100, kind="evaluation", mode="greedy", step=0, term=1
        )
    ]
    file.add(rows)
    for step in range(1, 1001):
        file.add(
            rows_of(
                scored(text),
                max_characters=1000,
                lags=[0, 0],
                kind="train",
                mode="",
                step=step,
                term=1,
            )
        )
    file.close()
    assert (tmp_path / "samples.jsonl").stat().st_size < 1.1 * 1024**2
    kept = list(read_rows(tmp_path / "samples.jsonl"))
    steps = sorted({row["step"] for row in kept if row["kind"] == "train"})
    gaps = {after - before for before, after in pairwise(steps)}
    assert len(gaps) == 1
    assert gaps.pop() > 1
    assert steps[-1] > 990
    assert 0 < len([row for row in kept if row["kind"] == "evaluation"]) < len(rows)


def test_a_folder_that_can_t_be_written_does_not_stop_the_run(tmp_path):
    file = SamplesFile(tmp_path / "absent", SamplesSettings())
    file.add(train_rows(1))
    file.add(train_rows(2))
    file.close()
