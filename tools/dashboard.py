"""Write the Grafana dashboard, or check that what is committed is what this writes.

Usage: ``python tools/dashboard.py [--check]``

Rows and panels stand below as they appear. ``tests/unit/test_dashboards.py`` holds the
queries against the table of metrics.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "deploy/grafana/vorrang.json"
WIDTH, HEIGHT = 24, 8

#: What the variables at the top of the dashboard choose.
SERVER = 'namespace=~"$namespace",instance=~"$instance"'
SERIES = f'{SERVER},class=~"$class",tenant=~"$tenant"'
Queries = list[tuple[str, str]]


def rate(metric: str, by: str, selector: str = SERIES) -> str:
    """Per second, added up over what is not named."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str, selector: str = SERIES) -> str:
    """Of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', labels, selector)})"


def quantiles(metric: str, by: str = "class", selector: str = SERIES) -> Queries:
    """The three that are looked at, by class."""
    name = f"{{{{{by}}}}} " if by else ""
    return [(quantile(share, metric, by, selector), f"{name}p{share * 100:g}") for share in (0.5, 0.95, 0.99)]


def share(part: str, whole: str) -> str:
    """Nothing of nothing is no point rather than NaN."""
    return f"{part} / ({whole} > 0)"


def mean(metric: str, by: str, selector: str) -> str:
    """Of a histogram."""
    return share(rate(f"{metric}_sum", by, selector), rate(f"{metric}_count", by, selector))


def panel(title: str, text: str, unit: str, queries: Queries, **more: Any) -> dict[str, Any]:
    """Lines over time."""
    custom = {"fillOpacity": 10, "showPoints": "never", "lineWidth": 1}
    if more.get("stacked"):
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return {
        "type": more.get("kind", "timeseries"),
        "title": title,
        "description": text,
        "width": more.get("width", 8),
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": custom, **more.get("defaults", {})},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(queries)
        ],
    }


def stat(title: str, text: str, unit: str, expr: str, **more: Any) -> dict[str, Any]:
    """One number, as it is now."""
    made = panel(title, text, unit, [(expr, "")], kind="stat", width=4, **more)
    made["fieldConfig"]["defaults"].pop("custom")
    made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    return made


def heat(title: str, text: str, unit: str, expr: str) -> dict[str, Any]:
    """Where a histogram's values lie, over time."""
    made = panel(title, text, "none", [(expr, "{{le}}")], kind="heatmap", width=12)
    made["targets"][0]["format"] = "heatmap"
    made["fieldConfig"]["defaults"] = {}
    made["options"] = {"calculate": False, "yAxis": {"unit": unit}, "tooltip": {"mode": "single"}}
    return made


_USED = "sum(vorrang_{0}{{{1}}} - vorrang_{0}_free{{{1}}})"
#: Tokens that went through the model, by class: prompts less what was cached, outputs, and what was lost.
COMPUTED = (
    " + ".join(rate(f"vorrang_{name}_tokens_total", "class") for name in ("prompt", "output", "recomputed"))
    + f" - {rate('vorrang_cached_tokens_total', 'class')}"
)
_RED_ABOVE_0 = {
    "thresholds": {"mode": "absolute", "steps": [{"color": "green"}, {"color": "red", "value": 1}]}
}

ROWS: dict[str, list[dict[str, Any]]] = {
    "Now": [
        stat("Servers that serve", "Health says SERVING.", "none", f"sum(vorrang_serving{{{SERVER}}})"),
        stat("Draining", "Take no new requests.", "none", f"sum(vorrang_draining{{{SERVER}}})"),
        stat(
            "Waiting",
            "Requests that never had a seat.",
            "none",
            f'sum(vorrang_requests{{{SERIES},state="waiting"}})',
        ),
        stat(
            "Seats taken",
            "Share of the running batch.",
            "percentunit",
            share(_USED.format("seats", SERVER), f"sum(vorrang_seats{{{SERVER}}})"),
        ),
        stat(
            "KV blocks in use",
            "Without those that the prefix cache alone holds.",
            "percentunit",
            share(_USED.format("kv_blocks", SERVER), f"sum(vorrang_kv_blocks{{{SERVER}}})"),
        ),
        stat(
            "Runner restarts",
            "In the range shown.",
            "none",
            f"sum(increase(vorrang_runner_restarts_total{{{SERVER}}}[$__range]))",
            defaults=_RED_ABOVE_0,
        ),
    ],
    "Traffic by class": [
        panel("Requests accepted", "Let into the queue.", "reqps",
              [(rate("vorrang_requests_accepted_total", "class"), "{{class}}")], stacked=True),
        panel("Output tokens", "What the users get.", "tok/s",
              [(rate("vorrang_output_tokens_total", "class"), "{{class}}")], stacked=True),
        panel("Prompt tokens", "Of requests that started.", "tok/s",
              [(rate("vorrang_prompt_tokens_total", "class"), "{{class}}")], stacked=True),
        panel("Ends by reason", "stop and length are the usual ones; failed: is an error of that reason.",
              "reqps", [(rate("vorrang_requests_ended_total", "reason"), "{{reason}}")], width=12),
        panel("Refusals by reason", "Calls and requests that were not let in; docs/TROUBLESHOOTING.md has"
              " each reason.", "reqps",
              [(rate("vorrang_refusals_total", "reason", f'{SERVER},tenant=~"$tenant"'), "{{reason}}")],
              width=12),
    ],
    "Latency by class": [
        panel("Time to first token", "From arrival to the first output token.", "s",
              quantiles("vorrang_ttft_seconds")),
        panel("Time per output token", "After the first; one value a request.", "s",
              quantiles("vorrang_tpot_seconds")),
        panel("Gap between outputs", "What a reader sees as a pause, preemptions included.", "s",
              quantiles("vorrang_token_gap_seconds")),
        panel("Time in the queue", "From arrival to the first seat.", "s", quantiles("vorrang_queue_seconds"),
              width=12),
        panel("Whole request", "From arrival to the end.", "s", quantiles("vorrang_request_seconds"),
              width=12),
    ],
    "Queue and seats": [
        panel("Waiting", "Never had a seat.", "none",
              [(f'sum by (class) (vorrang_requests{{{SERIES},state="waiting"}})', "{{class}}")],
              stacked=True),
        panel("Requests by state", "Preempted ones wait for a seat again, parked ones for their client.",
              "none", [(f"sum by (state) (vorrang_requests{{{SERIES}}})", "{{state}}")], stacked=True),
        panel("Seats", "Of the running batch.", "none",
              [(f"sum(vorrang_seats{{{SERVER}}})", "there are"),
               (_USED.format("seats", SERVER), "taken")]),
    ],
    "KV, preemptions, recompute tax": [
        panel("KV blocks", "In use, without those that the prefix cache alone holds.", "none",
              [(f"sum(vorrang_kv_blocks{{{SERVER}}})", "there are"),
               (_USED.format("kv_blocks", SERVER), "in use")], width=6),
        panel("Preemptions", "What was needed: seats, blocks, growth; operator and runner otherwise.", "ops",
              [(rate("vorrang_preemptions_total", "class, reason"), "{{class}}: {{reason}}")], width=6),
        panel("Recompute tax", "Share of the tokens computed that were computed before.", "percentunit",
              [(share(rate("vorrang_recomputed_tokens_total", "class"), COMPUTED), "{{class}}")], width=6),
        panel("Prefix cache hits", "Share of prompt tokens found there.", "percentunit",
              [(share(rate("vorrang_cached_tokens_total", "class"),
                      rate("vorrang_prompt_tokens_total", "class")), "{{class}}")], width=6),
        panel("Guesses that were right", "Share of drafted tokens, where speculation is on.", "percentunit",
              [(share(rate("vorrang_accepted_tokens_total", "class"),
                      rate("vorrang_drafted_tokens_total", "class")), "{{class}}")], width=6),
    ],
    "Steps": [
        heat("Duration of steps", "Each column is a distribution.", "s",
             rate("vorrang_step_seconds_bucket", "le", SERVER)),
        panel("Duration of steps", "Quantiles.", "s", quantiles("vorrang_step_seconds", "", SERVER),
              width=12),
        panel("Steps", "A second.", "ops",
              [(rate("vorrang_step_seconds_count", "instance", SERVER), "{{instance}}")]),
        panel("Requests in a step", "Mean.", "none",
              [(mean("vorrang_step_requests", "kind", SERVER), "{{kind}}")], stacked=True),
        panel("Tokens in a step", "Mean.", "none",
              [(mean("vorrang_step_tokens", "kind", SERVER), "{{kind}}")], stacked=True),
    ],
    "Runner, sessions, credit": [
        panel("Runner restarts", "The process that computes was lost and started again.", "none",
              [(f"sum by (instance) (increase(vorrang_runner_restarts_total{{{SERVER}}}[$__rate_interval]))",
                "{{instance}}")]),
        panel("Sessions and calls", "Open ones; calls include sessions.", "none",
              [(f"sum(vorrang_sessions{{{SERVER}}})", "sessions"),
               (f"sum(vorrang_calls{{{SERVER}}})", "calls")]),
        panel("Credit stalls", "Requests parked because their client granted nothing more.", "ops",
              [(rate("vorrang_credit_stalls_total", "class"), "{{class}}")]),
    ],
    "Tenants": [
        panel("Output tokens", "By tenant.", "tok/s",
              [(rate("vorrang_output_tokens_total", "tenant"), "{{tenant}}")], width=12, stacked=True),
        panel("Refusals", "By tenant.", "reqps",
              [(rate("vorrang_refusals_total", "tenant", f'{SERVER},tenant=~"$tenant"'), "{{tenant}}")],
              width=12),
    ],
    "Process": [
        panel("Resident memory", "Of the server; the model's process is another one.", "bytes",
              [(f"process_resident_memory_bytes{{{SERVER}}}", "{{instance}}")]),
        panel("CPU", "Of the server; the model's process is another one.", "none",
              [(rate("process_cpu_seconds_total", "instance", SERVER), "{{instance}}")]),
        panel("Open files", "", "none", [(f"process_open_fds{{{SERVER}}}", "{{instance}}")]),
        panel("Tasks", "Of the server's event loop.", "none",
              [(f"sum by (instance) (vorrang_tasks{{{SERVER}}})", "{{instance}}")]),
    ],
}  # fmt: skip


def variable(name: str, of: str, **more: Any) -> dict[str, Any]:
    """A choice at the top, of the values of a label."""
    return {
        "type": "query", "name": name, "label": name.capitalize(), "query": f"label_values({of}, {name})",
        "datasource": {"type": "prometheus", "uid": "${datasource}"}, "refresh": 2, "sort": 1,
        "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
        **more,
    }  # fmt: skip


def panels() -> list[dict[str, Any]]:
    """All of them with their places."""
    placed: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        placed.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )  # fmt: skip
        x, y = 0, y + 1
        height = 4 if all(entry["type"] == "stat" for entry in row) else HEIGHT
        for entry in row:
            width = entry["width"]
            if x + width > WIDTH:
                x, y = 0, y + height
            where = {"x": x, "y": y, "w": width, "h": height}
            shown = {key: value for key, value in entry.items() if key != "width"}
            placed.append(
                {**shown, "gridPos": where, "datasource": {"type": "prometheus", "uid": "${datasource}"}}
            )
            x += width
        y += height
    return [{"id": number, **entry} for number, entry in enumerate(placed, 1)]


def dashboard() -> dict[str, Any]:
    """All of it, as Grafana imports it."""
    return {
        "uid": "vorrang",
        "title": "Vorrang",
        "description": "Who waits for whom, and what it costs. Written by tools/dashboard.py.",
        "tags": ["vorrang"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus",
                 "current": {}, "hide": 0},
                variable("namespace", "vorrang_serving"),
                variable("instance", "vorrang_serving"),
                variable("class", "vorrang_requests_accepted_total"),
                variable("tenant", "vorrang_requests_accepted_total"),
            ]
        },
        "panels": panels(),
    }  # fmt: skip


def main() -> int:
    """Write, or compare."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if sys.argv[1:] == ["--check"]:
        if TARGET.read_text() == text:
            return 0
        print(f"{TARGET.relative_to(ROOT)} is not what tools/dashboard.py writes; run it")
        return 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
