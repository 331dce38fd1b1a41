"""Dashboard and alerts look at metrics that there are, and at all of them."""

import json
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from engine.priority import CLASSES
from engine.request import FinishReason, PreemptReason
from server.errors import TABLE as ERRORS
from server.metrics import TABLE
from server.metrics_port import STATES
from tests.support.process import ROOT
from tests.support.promql import Seen, look

DASHBOARD = ROOT / "deploy/grafana/vorrang.json"
RULES = ROOT / "deploy/prometheus/vorrang.rules.yaml"
RULES_TEST = ROOT / "deploy/prometheus/vorrang.rules.test.yaml"
#: Metrics of the table that no panel shows, and why.
LEFT_OUT: dict[str, str] = {}
#: What Prometheus, and its operator, put on every series.
FROM_PROMETHEUS = {"namespace", "job", "instance", "pod"}
#: What prometheus_client's collector of a process gives besides.
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"}
VALUES = {
    "class": {entry.name for entry in CLASSES},
    "state": set(STATES),
    "kind": {"prefill", "decode"},
}
REFUSALS = {row.reason for row in ERRORS.values()}
REASONS = {
    "vorrang_requests_ended": {r.value for r in FinishReason} | {f"failed:{reason}" for reason in REFUSALS},
    "vorrang_refusals": REFUSALS,
    "vorrang_preemptions": {reason.value for reason in PreemptReason},
}


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text())["panels"]


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def rules() -> list[dict]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


RECORDED = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def base_of(metric: str) -> str:
    """Name in the table of what is scraped under ``metric``.

    Raises:
        KeyError: there is no such series.
    """
    for name, entry in TABLE.items():
        ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        if metric in {f"{name}{end}" for end in ends[entry.kind]}:
            return name
    raise KeyError(metric)


def labels_of(metric: str) -> set[str]:
    if metric in PROCESS:
        return FROM_PROMETHEUS
    if metric in RECORDED:
        return {label for seen in look(RECORDED[metric]) for label in seen.labels}
    more = {"le"} if metric.endswith("_bucket") else set()
    return {*TABLE[base_of(metric)].labels, *more, *FROM_PROMETHEUS}


def problem(seen: Seen) -> str | None:
    """What is wrong with a selector or a list of labels; None if nothing is."""
    if seen.labels:
        unknown = set(seen.labels) - set().union(*(labels_of(metric) for metric in seen.below))
        return f"{seen.below} have no label {unknown}" if unknown else None
    try:
        known = labels_of(seen.metric)
    except KeyError:
        return f"there is no metric {seen.metric}"
    for label, value in seen.matchers:
        if label not in known:
            return f"{seen.metric} has no label {label}"
        allowed = VALUES.get(label) or (REASONS[base_of(seen.metric)] if label == "reason" else None)
        if allowed is not None and not value.startswith("$"):
            unknown = set(value.split("|")) - allowed
            if unknown:
                return f"{seen.metric} never has {label} {unknown}"
    return None


def problems(expressions: list[str]) -> list[str]:
    return [said for text in expressions for seen in look(text) if (said := problem(seen)) is not None]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("vorrang_seat", "no metric vorrang_seat"),
        ("vorrang_ttft_seconds", "no metric"),
        ("vorrang_output_tokens", "no metric"),
        ('vorrang_requests{level="1"}', "no label level"),
        ('vorrang_requests{state="lost"}', "never has state"),
        ('rate(vorrang_preemptions_total{reason=~"seats|seat"}[5m])', "never has reason {'seat'}"),
        ("sum by (class) (vorrang_seats)", "no label {'class'}"),
        ("vorrang_seats / on (tenant) vorrang_seats_free", "no label {'tenant'}"),
        ("max_over_time(deriv(vorrang_seat[5m])[1h:1m])", "no metric"),
    ],
)
def test_a_query_for_what_there_is_not_is_found(expression, said):
    assert any(said in found for found in problems([expression])), problems([expression])


def test_every_query_of_the_dashboard_asks_for_what_there_is():
    assert len(dashboard_expressions()) > 30
    assert problems(dashboard_expressions()) == []


def test_every_metric_is_on_the_dashboard_or_left_out_on_purpose():
    shown = {seen.metric for text in dashboard_expressions() for seen in look(text) if seen.metric}
    names = {base_of(metric) for metric in shown - PROCESS}
    assert names | set(LEFT_OUT) == set(TABLE), "add a panel in tools/dashboard.py, or say why there is none"
    assert not names & set(LEFT_OUT)


def test_every_metric_is_in_the_operators_page():
    page = (ROOT / "docs/OPERATIONS.md").read_text()
    names = {f"{name}_total" if metric.kind == "counter" else name for name, metric in TABLE.items()}
    assert {name for name in names if not re.search(rf"`{name}[`{{]", page)} == set()


def test_legends_name_labels_that_the_query_keeps():
    for panel in panels():
        for target in panel.get("targets", ()):
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = {label for seen in look(target["expr"]) for label in seen.labels}
            if target["expr"].startswith("process_"):
                kept = FROM_PROMETHEUS
            assert named <= kept, (panel["title"], named - kept)


def test_variables_ask_for_labels_that_there_are():
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    asked = [
        re.fullmatch(r"label_values\((\w+), (\w+)\)", v["query"]) for v in variables if v["type"] == "query"
    ]
    assert {match[2] for match in asked} == {"namespace", "instance", "class", "tenant"}
    for match in asked:
        assert match[2] in labels_of(match[1])
    text = DASHBOARD.read_text()
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__range", "__all"}
    assert used == {variable["name"] for variable in variables}


def test_panels_have_ids_and_places_of_their_own():
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for one, other in combinations([panel["gridPos"] for panel in panels()], 2):
        apart = (
            one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        )  # fmt: skip
        assert apart, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels())


def test_the_dashboard_is_what_its_script_writes():
    done = subprocess.run([sys.executable, "tools/dashboard.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_every_alert_asks_for_what_there_is_and_says_what_to_do():
    assert problems([rule["expr"] for rule in rules()]) == []
    alerts = [rule for rule in rules() if "alert" in rule]
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description"}
        named = set(re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])))
        for seen in look(alert["expr"]):
            if seen.labels and not {"le"} & set(seen.labels):
                named -= set(seen.labels)
        selected = [seen.metric for seen in look(alert["expr"]) if seen.metric]
        assert named <= set().union(*(labels_of(metric) for metric in selected)), alert["alert"]


def test_every_alert_is_played_through():
    played = yaml.safe_load(RULES_TEST.read_text())["tests"]
    fired = {
        case["alertname"] for test in played for case in test.get("alert_rule_test", ()) if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}
    series = [entry["series"] for test in played for entry in test["input_series"]]
    assert problems(series) == []


def promtool() -> str | None:
    return shutil.which("promtool", path=f"{ROOT / 'build/tools'}:/usr/bin:/usr/local/bin")


@pytest.mark.deep
@pytest.mark.skipif(promtool() is None, reason="promtool is not here; `make check-chart` brings it")
@pytest.mark.parametrize(
    "arguments", [("check", "rules", RULES), ("test", "rules", RULES_TEST)], ids=["check", "play"]
)
def test_prometheus_own_tool_agrees(arguments: tuple[str | Path, ...]):
    done = subprocess.run([promtool(), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
