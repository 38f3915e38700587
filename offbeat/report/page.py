"""Writes the report of a run: one HTML file that needs nothing else, not even a network. Used by `offbeat report`.

Texts of a run are never markup: the template escapes, the script writes text nodes, and the page's own policy lets no
script run but the three whose hashes it names.
"""

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import bokeh
from bokeh.embed import json_item
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from offbeat import __version__
from offbeat.errors import ConfigError
from offbeat.report.charts import Section
from offbeat.report.figures import COLOURS
from offbeat.report.records import Process, Record
from offbeat.report.run_data import RunData, gather
from offbeat.report.sections import sections
from offbeat.report.tiles import duration, tiles

MOST_SAMPLE_CHARACTERS = 4_000_000
"""Of the samples in the page; past that, only those of every second, fourth … step are shown."""
SAMPLE_COLUMNS = (
    *("kind", "step", "version", "lag", "ordinal", "index", "prompt", "completion", "reward"),
    *("components", "finish", "tokens"),
)


def write_report(run_folder: Path, out: Path) -> RunData:
    """Writes the page of a run, whole or not at all; returns what it tells. Raises `ConfigError`, `OSError`."""
    if not out.parent.is_dir():
        raise ConfigError(
            f"{out}: there is no folder {out.parent}; make it, or choose another file"
        )
    run = gather(run_folder)
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(render(run), encoding="utf-8")
    partial.replace(out)
    return run


def render(run: RunData) -> str:
    """The page."""
    shown = sections(run)
    samples = sample_table(run.samples)
    environment = Environment(
        loader=PackageLoader("offbeat.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = {"bokeh": bokeh_script(), "page": _own("script.js")}
    return environment.get_template("template.html.j2").render(
        run=run,
        version=__version__,
        title=run.recipe.run_id if run.recipe.run.id else run.folder.name,
        began=_began(run),
        lasted=duration(run.seconds),
        tiles=tiles(run),
        alarms=run.alarms(),
        sections=shown,
        environments=environments(run.processes),
        colours=COLOURS,
        style=Markup(_own("style.css")),
        scripts={name: Markup(text) for name, text in scripts.items()},
        policy=policy(list(scripts.values())),
        charts_json=as_json(chart_items(shown)),
        samples_json=as_json(samples),
        colours_json=as_json(dict(COLOURS.values())),
        samples_count=len(samples["rows"]),
        samples_left_out=len(run.samples) - len(samples["rows"]),
    )


def bokeh_script() -> str:
    """The script of the installed Bokeh. It is not part of this project: it goes from that package into the page."""
    path = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    return path.read_text(encoding="utf-8").strip()


def policy(scripts: Sequence[str]) -> str:
    """A content security policy: nothing is loaded, and no script runs but these."""
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def as_json(value: Any) -> Markup:
    """JSON that may stand inside a script element: without < nothing can end that."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


def chart_items(shown: Sequence[Section]) -> dict[str, Any]:
    """What Bokeh's script draws each chart from, by the chart's name."""
    return {
        chart.name: json_item(chart.figure, f"chart-{chart.name}")
        for section in shown
        for chart in section.charts
    }


def sample_table(samples: Sequence[Record]) -> dict[str, Any]:
    """The samples as rows of `SAMPLE_COLUMNS`; a prompt is stored once, its column is its place among `prompts`."""
    chosen = bounded(samples)
    prompts: dict[str, int] = {}
    rows = []
    for sample in chosen:
        prompt = prompts.setdefault(str(sample.get("prompt", "")), len(prompts))
        kind = sample.get("mode") or sample.get("kind")
        values = {**sample, "kind": kind, "prompt": prompt, "finish": sample.get("finish_reason")}
        rows.append([values.get(column) for column in SAMPLE_COLUMNS])
    return {"columns": list(SAMPLE_COLUMNS), "prompts": list(prompts), "rows": rows}


def bounded(samples: Sequence[Record]) -> list[Record]:
    """All samples, or those of every second, fourth … step when there is too much text."""
    chosen, stride = list(samples), 1
    while size_of(chosen) > MOST_SAMPLE_CHARACTERS:
        stride *= 2
        steps = sorted({sample["step"] for sample in samples})[::stride]
        if len(steps) < 2:
            # All of one step: some of its groups must do.
            share = max(2, -(-size_of(samples) // MOST_SAMPLE_CHARACTERS))
            return chosen[::share]
        kept = set(steps)
        chosen = [sample for sample in samples if sample["step"] in kept]
    return chosen


def size_of(samples: Sequence[Record]) -> int:
    """About how many characters the samples take in the page."""
    return sum(len(str(sample.get("completion", ""))) + 100 for sample in samples)


def environments(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """The environments of the services, equal ones together."""
    found: dict[str, dict[str, Any]] = {}
    for process in processes:
        if not process.environment:
            continue
        key = json.dumps(process.environment, sort_keys=True)
        entry = found.setdefault(key, {**process.environment, "services": []})
        if process.service not in entry["services"]:
            entry["services"].append(process.service)
    return list(found.values())


def _began(run: RunData) -> str:
    times: list[float] = [line["time"] for line in run.metrics.starts]
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(times[0])) if times else ""


def _own(name: str) -> str:
    """A file of the page's own style or script, without what could end its element."""
    text = resources.files("offbeat.report").joinpath("page", name).read_text(encoding="utf-8")
    assert not re.search(r"</(script|style)", text)
    return text.strip()
