# SPDX-License-Identifier: Apache-2.0
"""deploy/prometheus and deploy/grafana: expressions that can be read, of metrics that a master has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from moonpool.master import Master
from moonpool.master.calls import methods
from moonpool.store_client import StoreClient

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
RULES_TEST = Path(__file__).with_name("rules_test.yml")
DASHBOARD = json.loads((DEPLOY / "grafana" / "moonpool.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
#: Metric -> label -> values.
Series = dict[str, dict[str, set[str]]]
# What Prometheus adds to every series.
ADDED = {"job", "instance"}


def alerts(read: Callable[[str], Any]) -> list[dict[str, Any]]:
    return [rule for group in read("prometheus/rules.yml")["groups"] for rule in group["rules"]]


def plain(expression: str) -> str:
    """Return an expression of the dashboard as Grafana sends it."""
    return expression.replace("$__rate_interval", "1m").replace("$job", "moonpool-master")


def selectors(expression: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield the metrics of an expression, each with its conditions: label, operator, value.

    Raises:
        ValueError: it is no PromQL.
    """
    # It prints what it has understood, with every metric as NAME or NAME{LABEL="VALUE",...}.
    text = promql_parser.parse(plain(expression)).prettify()
    for name, inside in re.findall(r"\b(moonpool_\w+|up)\b(?:\{([^}]*)\})?", text):
        yield name, re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', inside)


@pytest.fixture(scope="module")
def series() -> Series:
    """What a master shows that has carried out a call."""
    with Master(listen="127.0.0.1:0", http="127.0.0.1:0", store="memory") as master:
        with StoreClient(master.address) as client:
            client.exists("a", [bytes(32)])
        with urllib.request.urlopen(f"http://{master.http_address}/metrics", timeout=30) as page:
            text = page.read().decode()
    found: Series = {"up": {}}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, inside = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()  # type: ignore[union-attr]
            labels = found.setdefault(name, {})
            for label, value in re.findall(r'(\w+)="([^"]*)"', inside or ""):
                labels.setdefault(label, set()).add(value)
    # Only calls that were made, and refusals that there were, have series.
    found["moonpool_master_calls_refused_total"] = {"code": set(), "method": set()}
    for name in found:
        if "method" in found[name]:
            found[name]["method"] = set(methods())
    return found


def check(expression: str, series: Series) -> None:
    """See that there are the metrics, their labels and, as far as they are spelled out, the labels' values."""
    seen = list(selectors(expression))
    assert seen, expression
    for name, conditions in seen:
        assert name in series, f"no master shows {name}"
        for label, operator, value in conditions:
            if label in ADDED:
                continue
            assert label in series[name], f"{name} has no label {label}"
            values = value.split("|") if operator.endswith("~") else [value]
            assert set(values) <= series[name][label], f"{name} has no {label} of {value}"


def test_alerts_are_of_metrics_that_there_are(read: Callable[[str], Any], series: Series) -> None:
    for alert in alerts(read):
        check(alert["expr"], series)


def test_every_alert_says_how_bad_it_is_and_what_to_do(read: Callable[[str], Any]) -> None:
    found = alerts(read)
    assert len({alert["alert"] for alert in found}) == len(found) > 10
    for alert in found:
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(alert["annotations"]) == {"summary", "runbook"}
        assert len(alert["annotations"]["runbook"]) > 60


def test_what_is_worth_an_alert_has_one(read: Callable[[str], Any]) -> None:
    page = (DEPLOY.parent / "docs" / "master.md").read_text(encoding="utf-8")
    (worth,) = re.findall(r"^Worth an alert: (.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(\w+)(?:\{[^`]*)?`", worth)
    assert len(named) > 5
    text = " ".join(alert["expr"] for alert in alerts(read))
    # The index's memory has no limit that fits all: what bounds it is the number of chunks.
    missing = [name for name in named if f"moonpool_master_{name}" not in text]
    assert missing == ["index_memory_bytes"]


def test_alerts_and_the_scrape_are_of_one_job(read: Callable[[str], Any]) -> None:
    scrape = read("prometheus/scrape.yml")
    (job,) = (one["job_name"] for one in scrape["scrape_configs"])
    assert scrape["rule_files"] == [RULES.name]
    for alert in alerts(read):
        for _, conditions in selectors(alert["expr"]):
            assert ("job", "=", job) in conditions


def test_panels_are_of_metrics_that_there_are(series: Series) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            check(target["expr"], series)
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                labels = {one for name, _ in selectors(target["expr"]) for one in series[name]}
                assert label in labels | ADDED, f"{panel['title']}: {label}"


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job"}
    for panel in PANELS:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for thing in (panel, *panel["targets"]):
            assert thing["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Health", "Use", "Calls", "Space", "Sessions, pins and copies", "Disks", "Store"]


def test_promtool_has_nothing_to_say() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed")
    for what in (["check", "config", RULES.with_name("scrape.yml")], ["test", "rules", RULES_TEST]):
        done = subprocess.run([tool, *what], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
