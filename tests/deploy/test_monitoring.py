"""deploy/monitoring: what is scraped is there, and what is asked for is exported."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from offbeat.v1 import learner_pb2
from services.learner.scaling import Scaling
from tests.deploy.fit import exported
from tests.deploy.manifests import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
METRIC = re.compile(r"\b(?:offbeat|redis)_[a-z_]+")
SELECTOR = re.compile(r"(offbeat_[a-z_]+)\{([^}]*)\}")
CHOICE = re.compile(r'(\w+)=~?"([^"]*)"')
OF_REDIS = {"redis_memory_used_bytes", "redis_memory_max_bytes"}
"""Of redis_exporter, as its documentation has them."""


def load(name: str) -> Any:
    return yaml.safe_load((MONITORING / name).read_text())


def services() -> dict[str, Any]:
    text = (ROOT / "docker-compose.yml").read_text()
    return yaml.safe_load(text)["services"]  # type: ignore[no-any-return]


def queries() -> Iterator[tuple[str, str]]:
    """(where, query) of each panel and alert."""
    for panel in json.loads((MONITORING / "dashboards/offbeat.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in load("alerts.yml")["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def unknown(asked: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """(where, name) of metrics that nothing exports."""
    known = exported() | OF_REDIS
    names = {(where, name) for where, query in asked for name in METRIC.findall(query)}
    return {(where, name) for where, name in names if name not in known}


def test_every_metric_that_is_asked_for_is_exported() -> None:
    assert unknown(queries()) == set()
    assert len(list(queries())) > 20


@pytest.mark.parametrize(
    "query",
    ["max(offbeat_learner_steps)", "rate(offbeat_reward_groups_dead[5m])", "redis_memory_bytes"],
    ids=["no such metric", "a counter without _total", "not of the exporter"],
)
def test_a_metric_that_nothing_exports_is_found(query: str) -> None:
    assert unknown([("planted", query)])


def test_labels_that_are_chosen_by_exist_with_the_values_asked_for() -> None:
    code = "".join(path.read_text() for path in (ROOT / "services/learner").rglob("*.py"))
    board = SimpleNamespace(
        checkpoint_step=0, waiting_seconds=0.0, started=0.0, read=learner_pb2.Progress
    )
    has = {
        (sample.name, label, value)
        for metric in Scaling(board).collect()
        for sample in metric.samples
        for label, value in sample.labels.items()
    }
    chosen = [
        (name, label, value)
        for _, query in queries()
        for name, choices in SELECTOR.findall(query)
        for label, values in CHOICE.findall(choices)
        for value in values.split("|")
    ]
    assert len(chosen) > 3
    for name, label, value in chosen:
        if name == "offbeat_learner_step_metric":  # one series for each metric of a step
            assert label == "name"
            assert value in code, value
        else:
            assert (name, label, value) in has


def test_queries_are_well_formed() -> None:
    for where, query in queries():
        for opening, closing in ("()", "[]", "{}"):
            assert query.count(opening) == query.count(closing), where
        # A rate is of a counter, and a counter ends in _total; the step alone is a gauge that only grows.
        for name in re.findall(r"(?:rate|increase)\((offbeat_[a-z_]+)", query):
            assert name.endswith("_total") or name == "offbeat_learner_step", (where, name)


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: Debian's package prometheus has it"
)
def test_prometheus_would_take_configuration_alerts_and_queries(tmp_path: Path) -> None:
    rules = [{"record": f"query:{at}", "expr": query} for at, (_, query) in enumerate(queries())]
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]})
    )
    for words in (
        ["config", str(MONITORING / "prometheus.yml")],
        ["rules", str(tmp_path / "rules.yml")],
    ):
        done = subprocess.run(
            ["promtool", "check", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_is_scraped_on_the_port_that_it_has() -> None:
    jobs = {job["job_name"]: job for job in load("prometheus.yml")["scrape_configs"]}
    scraped = {found["names"][0]: found["port"] for found in jobs["offbeat"]["dns_sd_configs"]}
    # learner-gpu answers to the learner's name.
    serving = {name for name, each in services().items() if "metrics_port" in str(each)}
    assert set(scraped) == serving - {"learner-gpu"}
    for name, port in scraped.items():
        assert f"rpc.metrics_port={port}" in services()[name]["command"]
    (target,) = jobs["redis"]["static_configs"][0]["targets"]
    assert target.partition(":")[0] in services()


def test_grafana_finds_its_data_source_and_its_dashboards() -> None:
    (source,) = load("grafana/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    board = json.loads((MONITORING / "dashboards/offbeat.json").read_text())
    used = {target["datasource"]["uid"] for panel in board["panels"] for target in panel["targets"]}
    assert used == {source["uid"]}
    (provider,) = load("grafana/dashboards/offbeat.yml")["providers"]
    mounted = dict(v.split(":")[:2] for v in services()["grafana"]["volumes"])
    assert mounted["./deploy/monitoring/dashboards"] == provider["options"]["path"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/offbeat.json"


def test_panels_do_not_lie_on_each_other() -> None:
    panels = json.loads((MONITORING / "dashboards/offbeat.json").read_text())["panels"]
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
