"""The report is one file that needs nothing else, tells everything, and takes no text of a run for markup."""

import base64
import hashlib
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.report.page import MOST_SAMPLE_CHARACTERS, bounded, render, write_report
from offbeat.report.records import read_metrics, read_samples
from offbeat.report.run_data import gather

RESUMED = Path(__file__).parents[2] / "data" / "resumed_run"
SECTIONS = ("learning", "staleness", "time", "weights", "optimisation", "samples", "setup")
CHARTS = {
    *("reward", "passed", "evaluation", "evaluation-0", "kl", "drift", "lag", "ess", "timeline"),
    *("step-time", "throughput", "updates", "bytes", "loss", "gradient", "rate", "entropy"),
    *("lengths", "endings"),
}
EVIL = (
    "<script>document.title='broken'</script>",
    "</script><img src=x onerror=\"document.title='broken'\">",
    "<!--<script>",
    "{{ 7 * 7 }} & \"quoted\" 'text' \u2028",
)


class Page(HTMLParser):
    """What the tests look at: attributes of all elements, and the content of the scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.texts.append(data)

    @property
    def ids(self) -> set[str | None]:
        return {attributes.get("id") for _, attributes in self.elements}

    def data(self, name: str):
        """The JSON of a data block."""
        blocks = [a for tag, a in self.elements if tag == "script"]
        place = [a.get("id") for a in blocks].index(f"{name}-data")
        return json.loads(self.scripts[place])


def page_of(folder) -> Page:
    return Page(render(gather(folder)))


@pytest.fixture(scope="module")
def html():
    """The page of the run as it is; made once, since that takes a second."""
    return render(gather(RESUMED))


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def append(path, *records):
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_the_page_tells_everything_about_a_resumed_run(page):
    assert set(SECTIONS) <= page.ids
    assert page.data("charts").keys() == CHARTS
    assert {f"chart-{name}" for name in CHARTS} <= page.ids
    text = " ".join(page.texts)
    for part in ("14 / 14", "finished", "Clean: every ordinal counts exactly once.", "max_lag 1",
                 "2 learners, one after the other", "mismatch_kl: alarm", "vllm-cpu",
                 "prompts_per_step: 8"):  # fmt: skip
        assert part in text, part


def test_the_page_refers_to_nothing_outside(html, page):
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "base", "img"}
        for name in ("src", "href", "action", "srcset", "poster", "data"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    style = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert "@import" not in style
    assert "url(" not in style


def test_the_policy_names_every_script_that_may_run(page):
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    blocks = [a for tag, a in page.elements if tag == "script"]
    runs = [s for s, a in zip(page.scripts, blocks, strict=True) if "type" not in a]
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in runs
    }
    assert len(hashes) == 2
    assert set(re.findall(r"'sha256-[^']+'", policy)) == hashes
    assert policy.startswith("default-src 'none'")


def test_data_of_the_page_is_that_of_the_run(page):
    metrics = read_metrics(RESUMED)
    samples = read_samples(RESUMED, metrics.starts)
    table = page.data("samples")
    columns = {name: place for place, name in enumerate(table["columns"])}
    assert len(table["rows"]) == len(samples) > 20
    for row, sample in zip(table["rows"], samples, strict=True):
        assert table["prompts"][row[columns["prompt"]]] == sample["prompt"]
        for name in ("completion", "reward", "components", "step", "version", "lag", "tokens"):
            assert row[columns[name]] == sample[name]
    assert {sample["term"] for sample in samples if sample["step"] > 3} == {2}
    drawn = json.dumps(page.data("charts")["reward"])
    for line in metrics.steps:
        assert str(line["reward/mean"]) in drawn


def test_texts_of_the_run_are_never_markup(page, run_folder):
    usual = page
    sample = read_samples(run_folder, [])[-1]
    append(
        run_folder / "samples.jsonl",
        *(
            sample | {"prompt": evil, "completion": evil, "components": {evil: 1.0}}
            for evil in EVIL
        ),
    )
    append(
        run_folder / "metrics.jsonl",
        {"kind": "evaluation", "mode": EVIL[0], "step": 14, "term": 2, "version": 20, "time": 1.0}
        | {
            f"eval/{EVIL[1]}/win": 0.5,
            f"eval/{EVIL[1]}/win_low": 0.4,
            f"eval/{EVIL[1]}/win_high": 0.6,
        },
    )
    (run_folder / "logs" / "a<b>.0.3.log").touch()
    recipe = run_folder / "recipe.yaml"
    recipe.write_text(recipe.read_text() + f"# {EVIL[0]}\n")
    page = page_of(run_folder)
    assert [e for e in page.elements if e[0] in {"script", "img"}] == [
        e for e in usual.elements if e[0] in {"script", "img"}
    ]
    table = page.data("samples")
    place = table["columns"].index("completion")
    assert [row[place] for row in table["rows"][-len(EVIL) :]] == list(EVIL)
    assert table["prompts"][-len(EVIL) :] == list(EVIL)
    assert any(EVIL[0] in text for text in page.texts)


def strip(folder, *names):
    for name in names:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def test_a_run_that_has_just_begun(run_folder):
    strip(run_folder, "metrics.jsonl", "samples.jsonl", "activity", "ledger", "checkpoints", "logs")
    page = page_of(run_folder)
    assert set(SECTIONS) <= page.ids
    assert page.data("charts") == {}
    text = " ".join(page.texts)
    assert "0 / 14" in text
    assert "stopped" in text
    assert "No samples were kept." in text


def test_a_run_without_an_evaluation_or_activity_in_its_first_step(run_folder):
    strip(run_folder, "activity", "samples.jsonl", "checkpoints")
    metrics = run_folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().split("\n") if line]
    kept = [line for line in lines if line["kind"] != "evaluation" and line["step"] <= 1]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in kept[:2]) + '{"step": 2, "ki')
    (run_folder / "ledger" / "000002.jsonl").unlink()
    page = page_of(run_folder)
    charts = page.data("charts")
    assert "reward" in charts
    assert not {"evaluation", "timeline", "updates"} & charts.keys()
    assert "1 / 14" in " ".join(page.texts)


def test_a_damaged_ledger_is_an_alarm_not_an_error(run_folder):
    ledger = run_folder / "ledger" / "000001.jsonl"
    ledger.write_text("no JSON\n" + ledger.read_text())
    run = gather(run_folder)
    assert run.audit is None
    assert any("damaged" in alarm.text for alarm in run.alarms())
    assert "damaged" in " ".join(Page(render(run)).texts)


def test_many_samples_are_bounded_evenly():
    samples = [
        {"step": step, "completion": "x" * 2000} for step in range(1, 2001) for _ in range(4)
    ]
    kept = bounded(samples)
    assert sum(len(sample["completion"]) for sample in kept) <= MOST_SAMPLE_CHARACTERS
    steps = sorted({sample["step"] for sample in kept})
    assert len(kept) == 4 * len(steps) >= 1000
    assert steps[0] == 1
    assert steps[-1] > 1990
    assert len({b - a for a, b in itertools.pairwise(steps)}) == 1


def test_samples_of_a_single_step_are_bounded(run_folder):
    samples = [{"step": 1, "completion": "x" * 10_000} for _ in range(2000)]
    kept = bounded(samples)
    assert 0 < sum(len(sample["completion"]) for sample in kept) <= MOST_SAMPLE_CHARACTERS


def test_a_page_is_written_whole_or_not_at_all(run_folder, tmp_path):
    out = tmp_path / "report.html"
    write_report(run_folder, out)
    assert out.read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigError, match="absent"):
        write_report(run_folder, tmp_path / "absent" / "report.html")
    assert not list(tmp_path.glob(".*partial"))
