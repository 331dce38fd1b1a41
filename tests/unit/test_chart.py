"""The Helm chart: its values are held by a schema, and what it renders fits the server.

What needs helm is skipped without it; ``make check-chart`` brings it.
"""

import functools
import json
import math
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from engine.priority import CLASSES
from server import health, serve
from server.metrics import TABLE
from server.metrics_port import STATES
from server.settings import load
from tests.support.process import ROOT
from tools.chart import CHART, KUBERNETES, SCHEMA, VALUES

SETS = ["default", *(path.stem for path in sorted(VALUES.glob("*.yaml")))]
HELM = shutil.which("helm", path=f"{ROOT / 'build/tools'}:/usr/local/bin:/usr/bin")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not here; `make check-chart` brings it")

#: Fields of the Prometheus operator's resources that we use; its own schemas are not at hand.
OPERATOR = {
    "ServiceMonitor": {
        "type": "object", "additionalProperties": False, "required": ["selector", "endpoints"],
        "properties": {
            "selector": {"type": "object", "required": ["matchLabels"]},
            "namespaceSelector": {"type": "object"},
            "endpoints": {"type": "array", "minItems": 1, "items": {
                "type": "object", "additionalProperties": False,
                "properties": {"port": {"type": "string"}, "interval": {"type": "string"}},
            }},
        },
    },
    "PrometheusRule": {
        "type": "object", "additionalProperties": False, "required": ["groups"],
        "properties": {"groups": {"type": "array", "items": {
            "type": "object", "additionalProperties": False, "required": ["name", "rules"],
            "properties": {"name": {"type": "string"}, "rules": {"type": "array", "items": {
                "type": "object", "additionalProperties": False, "required": ["expr"],
                "properties": {
                    "record": {"type": "string"}, "alert": {"type": "string"}, "expr": {"type": "string"},
                    "for": {"type": "string"},
                    "labels": {"type": "object"}, "annotations": {"type": "object"},
                },
            }}},
        }}},
    },
}  # fmt: skip


def merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            key: merged(base.get(key), over[key]) if key in over else base[key] for key in {**base, **over}
        }
    return over


def values(name: str) -> dict[str, Any]:
    """A set, over the chart's own."""
    own = yaml.safe_load((CHART / "values.yaml").read_text())
    return own if name == "default" else merged(own, yaml.safe_load((VALUES / f"{name}.yaml").read_text()))


def refusals(given: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text()))
    return [error.message for error in validator.iter_errors(given)]


def template(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [HELM, "template", "mine", CHART, "--namespace", "here", "--kube-version", "1.31", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@functools.cache
def rendered(name: str) -> list[dict[str, Any]]:
    done = template(*(() if name == "default" else ("--values", str(VALUES / f"{name}.yaml"))))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def one(name: str, *kinds: str) -> dict[str, Any]:
    (found,) = [
        entry
        for entry in rendered(name)
        if entry["kind"] in kinds and "test" not in entry["metadata"]["name"]
    ]
    return found


def pod(name: str) -> dict[str, Any]:
    return one(name, "Deployment", "StatefulSet")["spec"]["template"]


def test_the_schema_follows_the_settings():
    done = subprocess.run(
        [sys.executable, "tools/chart.py", "schema", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_version_is_the_packages():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", SETS)
def test_values_that_come_with_the_chart_pass(name):
    assert refusals(values(name)) == []


def test_every_value_has_its_place_in_the_schema():
    schema = json.loads(SCHEMA.read_text())["properties"]
    assert set(schema) - {"global"} == set(values("default"))
    for name, value in values("default").items():
        if schema[name].get("additionalProperties") is False:
            assert set(schema[name]["properties"]) == set(value), name


BAD = {
    "an unknown value": {"replica": 2},
    "an unknown value below": {"workload": {"replica": 2}},
    "another kind": {"workload": {"kind": "DaemonSet"}},
    "no setting": {"config": {"kv": {"num_block": 1}}},
    "a setting that can't be": {"config": {"kv": {"device_share": 1.5}}},
    "a policy by its wrong type": {"config": {"scheduler": {"policy": 1}}},
    "an address that the chart decides": {"config": {"server": {"listen": "0.0.0.0:1"}}},
    "tenants where they would be readable": {"config": {"tenants": {"acme": {}}}},
    "a token instead of its hash": {"tenants": {"values": {"acme": {"token_hashes": ["secret"]}}}},
    "a tenant's unknown limit": {"tenants": {"values": {"acme": {"seats": 4}}}},
    "a tenant's name": {"tenants": {"values": {"a b": {}}}},
    "tenants twice": {"tenants": {"values": {"acme": {}}, "existingSecret": "other"}},
    "autoscaling by metrics that are off": {"autoscaling": {"enabled": True}, "metrics": {"enabled": False}},
    "autoscaling by a class that is none": {"autoscaling": {"waiting": {"urgent": 1}}},
    "client certificates without TLS": {"tls": {"requireClientCertificate": True}},
    "a port": {"service": {"port": 70000}},
    "a rollout that can't begin": {"workload": {"maxSurge": 0, "maxUnavailable": 0}},
    "no card": {"gpu": {"enabled": True, "count": 0}},
    "a negative wait": {"drain": {"preStopSeconds": -1}},
    "a size": {"cache": {"size": "big"}},
    "an environment that would override": {"extraEnv": [{"name": "VORRANG_TLS__CERTIFICATE", "value": "x"}]},
}


@pytest.mark.parametrize("given", BAD.values(), ids=BAD)
def test_bad_values_are_refused(given):
    assert refusals(merged(values("default"), given))


@needs_helm
@pytest.mark.deep
@pytest.mark.parametrize("given", BAD.values(), ids=BAD)
def test_helm_itself_refuses_bad_values(given, tmp_path):
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(given))
    done = template("--values", str(tmp_path / "bad.yaml"))
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr


@needs_helm
@pytest.mark.deep
@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", SETS)
def test_what_is_rendered_is_what_kubernetes_knows(name, version):
    for document in rendered(name):
        if document["kind"] in OPERATOR:
            jsonschema.validate(document["spec"], OPERATOR[document["kind"]])
        else:
            kubernetes_validate.validate(document, version, strict=True)
        for key, value in document["metadata"].get("labels", {}).items():
            assert isinstance(value, str), key
            assert len(value) <= 63


@needs_helm
@pytest.mark.deep
@pytest.mark.parametrize("name", SETS)
def test_the_server_takes_the_settings(name, tmp_path, monkeypatch):
    (tmp_path / "vorrang.toml").write_text(one_config(name))
    for variable in pod(name)["spec"]["containers"][0]["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
        else:
            (secret,) = [entry for entry in rendered(name) if entry["kind"] == "Secret"]
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["name"] == secret["metadata"]["name"]
            monkeypatch.setenv(variable["name"], secret["stringData"][reference["key"]])
    settings = load(tmp_path / "vorrang.toml").settings
    settings.scheduler_config  # noqa: B018  # raises when values contradict each other
    given = values(name)
    assert set(settings.tenants) == set(given["tenants"]["values"])
    for section, wanted in given["config"].items():
        for key, value in wanted.items():
            found = getattr(getattr(settings, section), key)
            if isinstance(value, dict):
                assert {entry: getattr(found, entry) for entry in value} == value
            else:
                assert found == value
    assert (settings.tls.certificate is not None) == bool(given["tls"]["secretName"])
    assert settings.engine.tensor_parallel == (given["gpu"]["count"] if given["gpu"]["enabled"] else 1)
    ports = {entry["name"]: entry["containerPort"] for entry in pod(name)["spec"]["containers"][0]["ports"]}
    listening = {
        "grpc": settings.server.listen,
        "health": settings.health.listen,
        "metrics": settings.metrics.listen,
        "control": settings.control.listen,
    }
    assert ports == {key: int(where.rpartition(":")[2]) for key, where in listening.items() if where}


@needs_helm
@pytest.mark.deep
@pytest.mark.parametrize("name", SETS)
def test_the_pool_leaves_room_for_the_rest_in_the_pods_memory(name):
    limit = pod(name)["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    pool_bytes = tomllib.loads(one_config(name)).get("kv", {}).get("bytes")
    assert (pool_bytes is None) == values(name)["gpu"]["enabled"], "half of the node's memory would be taken"
    assert int(limit.removesuffix("Gi")) * 2**30 - (pool_bytes or 0) >= 1.5 * 2**30


def one_config(name: str) -> str:
    (found,) = [
        entry["data"]["vorrang.toml"]
        for entry in rendered(name)
        if entry["kind"] == "ConfigMap" and "vorrang.toml" in entry["data"]
    ]
    return found


@needs_helm
@pytest.mark.deep
@pytest.mark.parametrize("name", SETS)
def test_nobody_kills_a_server_that_drains_or_loads(name):
    spec, given = pod(name)["spec"], values(name)
    grace_s = given["config"].get("server", {}).get("grace_s", 30)
    takes_s = given["drain"]["preStopSeconds"] + math.ceil(grace_s) + 4 * serve.END_S_MAX
    assert spec["terminationGracePeriodSeconds"] > takes_s
    (container,) = spec["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == [
        "sleep",
        str(given["drain"]["preStopSeconds"]),
    ]
    (health_port,) = [entry["containerPort"] for entry in container["ports"] if entry["name"] == "health"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == health_port
        assert container[probe]["grpc"]["service"] in (*health.SERVICES, health.LIVE)
    assert container["livenessProbe"]["grpc"]["service"] == health.LIVE
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= given["probes"]["startupSeconds"]


@needs_helm
@pytest.mark.deep
@pytest.mark.parametrize("name", SETS)
def test_pods_are_as_locked_up_as_they_can_be(name):
    pods = [pod(name)["spec"], *(entry["spec"] for entry in rendered(name) if entry["kind"] == "Pod")]
    for spec in pods:
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        assert not spec["enableServiceLinks"], (
            "Kubernetes' variables of a service `vorrang` would look like ours"
        )
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    mounts = {mount["name"] for mount in pods[0]["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pods[0]["volumes"]}


@needs_helm
@pytest.mark.deep
@pytest.mark.parametrize("name", SETS)
def test_what_selects_pods_selects_these(name):
    labels = pod(name)["metadata"]["labels"].items()
    services = [entry for entry in rendered(name) if entry["kind"] == "Service"]
    assert len(services) == 2
    ports = {entry["name"] for entry in pod(name)["spec"]["containers"][0]["ports"]}
    for service in services:
        assert service["spec"]["selector"].items() <= labels
        assert {entry["targetPort"] for entry in service["spec"]["ports"]} <= ports
    for entry in rendered(name):
        selector = {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector"}.get(entry["kind"])
        if selector:
            assert entry["spec"][selector]["matchLabels"].items() <= labels
        if entry["kind"] == "ServiceMonitor":
            wanted = entry["spec"]["selector"]["matchLabels"].items()
            chosen = [service for service in services if wanted <= service["metadata"]["labels"].items()]
            assert [service["spec"].get("clusterIP") for service in chosen] == ["None"], (
                "or each pod counts twice"
            )
        if entry["kind"] == "NetworkPolicy":
            assert {port["port"] for rule in entry["spec"]["ingress"] for port in rule["ports"]} == ports
    workload = one(name, "Deployment", "StatefulSet")
    if workload["kind"] == "StatefulSet":
        assert workload["spec"]["serviceName"] in [service["metadata"]["name"] for service in services]


@needs_helm
@pytest.mark.deep
def test_the_autoscaler_asks_for_a_metric_that_there_is():
    scaler = one("autoscaling", "HorizontalPodAutoscaler")["spec"]
    workload = one("autoscaling", "Deployment")
    assert scaler["scaleTargetRef"]["name"] == workload["metadata"]["name"]
    assert "replicas" not in workload["spec"], "or every upgrade would undo what the autoscaler did"
    asked = [entry["pods"]["metric"] for entry in scaler["metrics"]]
    assert {metric["selector"]["matchLabels"]["class"] for metric in asked} == {
        entry.name for entry in CLASSES
    }
    for metric in asked:
        assert set(metric["selector"]["matchLabels"]) <= set(TABLE[metric["name"]].labels)
        assert metric["selector"]["matchLabels"]["state"] in STATES
    adapter = yaml.safe_load((ROOT / "deploy/helm/prometheus-adapter.yaml").read_text())["rules"]
    assert adapter["custom"][0]["seriesQuery"].startswith(f"{asked[0]['name']}{{")


@needs_helm
@pytest.mark.deep
def test_alerts_and_dashboard_are_those_of_this_repository():
    rules = yaml.safe_load((ROOT / "deploy/prometheus/vorrang.rules.yaml").read_text())
    assert one("autoscaling", "PrometheusRule")["spec"] == rules
    boards = [
        e["data"]["vorrang.json"] for e in rendered("autoscaling") if "vorrang.json" in e.get("data", {})
    ]
    assert [json.loads(board) for board in boards] == [
        json.loads((ROOT / "deploy/grafana/vorrang.json").read_text())
    ]


@needs_helm
@pytest.mark.deep
def test_another_release_has_other_names_and_pods_change_with_settings():
    names = {(entry["kind"], entry["metadata"]["name"]) for entry in rendered("default")}
    assert len(names) == len(rendered("default"))
    assert all("mine" in name for _, name in names)
    sums = {pod(name)["metadata"]["annotations"]["vorrang/config"] for name in SETS}
    assert len(sums) == len(SETS)


@needs_helm
@pytest.mark.deep
def test_helm_finds_nothing_to_complain_about():
    for name in SETS:
        more = () if name == "default" else ("--values", str(VALUES / f"{name}.yaml"))
        done = subprocess.run(
            [HELM, "lint", "--strict", CHART, *more], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_the_chart_holds_no_file_that_points_nowhere():
    for path in Path(CHART / "files").iterdir():
        assert path.resolve().is_file(), path
