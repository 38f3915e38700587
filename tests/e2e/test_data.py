"""Data through a whole run: a mixture arrives at the rewards in its shares, and a bad line ends the run at once."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.whole_run import start, write_recipe

REWARDS = """
import json, os, pathlib

def note(kind, prompts, **columns):
    with pathlib.Path(__file__).with_name(f"{kind}.{os.getpid()}.jsonl").open("a") as file:
        for index, prompt in enumerate(prompts):
            row = {name: values[index] for name, values in columns.items()}
            file.write(json.dumps({"prompt": prompt, **row}) + "\\n")

def letters(prompts, completions, **columns):
    note("letters", prompts, **columns)
    return [float(text.count("a")) for text in completions]

def lengths(prompts, completions, day, **columns):
    note("lengths", prompts, day=day, **columns)
    return [-float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_a_mixture_in_a_whole_run(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = "".join(f"{chr(97 + i)},{i}\n" for i in range(20))
    (tmp_path / "letters.csv").write_text(f"text,level\n{rows}")
    table = [{"prompt": chr(97 + i) * 2, "day": f"2026-01-{i + 1:02}"} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "days.parquet")
    parts = [
        {
            **{"name": "letters", "weight": 3, "prompt": "{text}"},
            "source": {"kind": "csv", "path": "letters.csv"},
        },
        {"name": "days", "weight": 1, "source": {"kind": "parquet", "path": "days.parquet"}},
    ]
    functions = [
        {"name": "letters", "path": "rewards.py:letters", "parts": ["letters"]},
        {"name": "lengths", "path": "rewards.py:lengths", "parts": ["days"]},
    ]
    recipe = write_recipe(
        tmp_path,
        data={"train": {"kind": "mixture", "parts": parts}, "heldout": None},
        reward={"functions": functions},
        schedule={"steps": 5},
    )
    with start(recipe) as run:
        run.succeed()
        audit = run.audit()
        assert (audit.trained + audit.filtered, audit.dead) == (40, 0)
        counts = json.loads((run.folder / "data.json").read_text())
    found = {counts["what"]: (counts["used"], counts["passes"]) for counts in counts}
    assert found == {
        "data.train.parts.0 (letters)": (20, 1.5),
        "data.train.parts.1 (days)": (5, 2.0),
    }
    letters, days = (
        [json.loads(line) for path in tmp_path.glob(f"{name}.*.jsonl") for line in path.open()]
        for name in ("letters", "lengths")
    )
    # Two completions of each; a part goes through all its rows before it uses one again.
    assert Counter(row["prompt"] for row in days) == {chr(97 + i) * 2: 4 for i in range(5)}
    assert days[0]["day"].startswith("2026-01-")
    assert len(letters) == 60
    assert set(Counter(row["prompt"] for row in letters).values()) == {2, 4}
    assert {row["part"] for row in letters} == {"letters"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_line_ends_the_run_with_one_that_names_it(tmp_path, ranks):
    recipe = write_recipe(tmp_path, learner={"ranks": ranks})
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": }\n')
    with start(recipe) as run:
        assert run.wait() == 2
        last = Path(run._log.name).read_text().strip().splitlines()[-1]
    assert f"data.train: {tmp_path}/train.jsonl:51: expected a JSON object" in last
