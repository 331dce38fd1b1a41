"""compose.yaml: what compose itself makes of it, and that it fits the server."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from server import serve
from server.settings import load
from tests.support.process import ROOT

COMPOSE = Path(sys.executable).with_name("docker-compose")


@pytest.fixture(scope="module")
def services() -> dict:
    """As compose resolves them, against its own schema; no container engine is asked."""
    if not COMPOSE.exists():
        pytest.skip("docker-compose is not in this environment")
    done = subprocess.run(
        [COMPOSE, "-f", ROOT / "compose.yaml", "config", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


def seconds(text: str) -> float:
    """Of a duration as compose writes it."""
    units = {"h": 3600, "m": 60, "s": 1, "ms": 0.001}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)(ms|h|m|s)", text))


def test_the_variables_are_settings_and_the_server_would_start(services, monkeypatch):
    vorrang = services["vorrang"]
    for name, value in vorrang["environment"].items():
        monkeypatch.setenv(name, value)
    settings = load(None, {"server.listen": vorrang["command"][-1]}).settings
    assert settings.server.insecure, "it listens on all interfaces of its container in plaintext"
    backstop_s = settings.server.grace_s + 4 * serve.END_S_MAX
    assert seconds(vorrang["stop_grace_period"]) > backstop_s, "it would be killed while it drains"
    assert settings.metrics.listen.endswith(":9464")
    limit_bytes = int(vorrang["deploy"]["resources"]["limits"]["memory"])
    assert limit_bytes - settings.kv.bytes >= 1.5 * 2**30


def test_ports_are_open_on_loopback_alone(services):
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name
    assert {port["target"] for port in services["vorrang"]["ports"]} == {50051}


def test_nothing_runs_as_root_or_writes_where_it_need_not(services):
    for name, service in services.items():
        assert not service["user"].startswith(("0:", "root")), name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"USER {services['vorrang']['user'].partition(':')[0]}\n" in dockerfile


def test_everything_is_asked_whether_it_is_well(services):
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", f"{name}: no shell is needed"
        assert seconds(service["healthcheck"]["timeout"]) <= seconds(service["healthcheck"]["interval"])


def test_what_is_mounted_is_there(services):
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), volume["source"]
                assert volume["read_only"], volume["source"]


def test_prometheus_scrapes_the_server_and_grafana_finds_both(services):
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    targets = {target for job in config["scrape_configs"] for target in job["static_configs"][0]["targets"]}
    assert f"vorrang:{services['vorrang']['expose'][0]}" in targets
    assert all((ROOT / "deploy/prometheus" / name).is_file() for name in config["rule_files"])
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/vorrang.yaml").read_text())["providers"]
    mounted = [volume["target"] for volume in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/vorrang.json" in mounted
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounted


def test_images_are_pinned(services):
    for name, service in services.items():
        assert re.search(r":(v?\d+\.\d+\.\d+|cpu)$", service["image"]), name
