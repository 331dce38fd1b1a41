"""Prometheus itself scrapes a server, with our rules, and answers every query of the dashboard."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import grpc
import pytest
import yaml

from tests.support.process import ROOT, server_process
from tests.support.wire import spec, stub
from vorrang.v1 import generation_pb2 as gen

PROMETHEUS = shutil.which("prometheus", path=f"{ROOT / 'build/tools'}:/usr/bin:/usr/local/bin")
#: Panels that may have nothing to show after a few requests that all went well.
QUIET = {"Refusals", "Refusals by reason", "Credit stalls", "Guesses that were right", "Preemptions"}

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not here; `make check-chart` brings it"),
]


def ask(address: str, path: str, **parameters: str) -> dict:
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)["data"]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def filled_in(expression: str) -> str:
    for name in ("namespace", "instance", "class", "tenant"):
        expression = expression.replace(f'"${name}"', '".*"')
    return expression.replace("$__rate_interval", "1m").replace("$__range", "1m")


@pytest.mark.timeout(90)
def test_every_panel_of_the_dashboard_shows_something(tmp_path: Path) -> None:
    with server_process("--metrics-listen", "127.0.0.1:0") as server:
        metrics = server.ready_line.rpartition("metrics on ")[2].split(",")[0].strip()
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"] = [{"job_name": "vorrang", "static_configs": [{"targets": [metrics]}]}]
        shutil.copy(ROOT / "deploy/prometheus/vorrang.rules.yaml", tmp_path)
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        command = [
            PROMETHEUS, f"--config.file={tmp_path / 'prometheus.yaml'}", f"--web.listen-address={address}",
            f"--storage.tsdb.path={tmp_path / 'data'}", "--log.level=warn",
        ]  # fmt: skip
        with subprocess.Popen(command, cwd=tmp_path) as prometheus:
            try:
                _wait_until_scraped(address)
                with grpc.insecure_channel(server.address) as channel:
                    for level in (-10, 0, 10) * 5:  # over several scrapes, or there is no rate
                        stub(channel).Generate(gen.GenerateRequest(spec=spec(level=level, max_tokens=4)))
                        time.sleep(0.4)
                time.sleep(1.5)
                _look_at_panels(address)
                rules = [rule for group in ask(address, "rules")["groups"] for rule in group["rules"]]
                assert {rule["health"] for rule in rules} == {"ok"}
                assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]
            finally:
                prometheus.terminate()


def _wait_until_scraped(address: str) -> None:
    ends = time.monotonic() + 30
    while True:
        try:
            if ask(address, "query", query="vorrang_serving == 1")["result"]:
                return
        except OSError:
            pass
        assert time.monotonic() < ends, "Prometheus scrapes nothing"
        time.sleep(0.5)


def _look_at_panels(address: str) -> None:
    panels = json.loads((ROOT / "deploy/grafana/vorrang.json").read_text())["panels"]
    for panel in panels:
        for target in panel.get("targets", ()):
            result = ask(address, "query", query=filled_in(target["expr"]))["result"]
            assert result or panel["title"] in QUIET, (panel["title"], target["expr"])
