"""The Helm chart: the part of its schema that follows from the server's settings, and its check.

Usage: ``python tools/chart.py schema [--check] | check``

``schema`` writes ``$defs`` of ``values.schema.json`` from ``server.settings``, so that a
value that the server would refuse is refused by ``helm install``; the rest of that file is
kept by hand. ``check`` sets up helm and promtool in ``build/tools`` where they are missing,
renders the chart with every set of values in ``deploy/helm/values``, checks what comes out
against Kubernetes' schemas, and says what it could not check.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/vorrang"
VALUES = ROOT / "deploy/helm/values"
SCHEMA = CHART / "values.schema.json"
TOOLS = ROOT / "build/tools"
HELM = "helm.sh/helm/v3/cmd/helm@v3.21.4"
#: What the chart is checked against: the oldest it says it works with, a new one.
KUBERNETES = ("1.27", "1.36")
#: Settings that the chart decides by values of its own.
OWNED = {
    "server": {"listen", "insecure"},
    "control": {"enabled", "listen"},
    "engine": {"tensor_parallel"},
}
OWNED_SECTIONS = {"tls", "tenants", "health", "metrics"}


def definitions() -> dict[str, Any]:
    """``Config`` and ``Tenant`` as JSON schemas, with all they refer to."""
    from server.settings import Settings

    schema = Settings.model_json_schema()
    found: dict[str, Any] = schema.pop("$defs")
    sections = {name: value for name, value in schema["properties"].items() if name not in OWNED_SECTIONS}
    for name, owned in OWNED.items():
        section = found[_target(sections[name])]["properties"]
        for setting in owned:
            del section[setting]
    for definition in found.values():
        definition.pop("required", None)  # what is left out keeps the server's default
    found["Config"] = {"type": "object", "additionalProperties": False, "properties": sections}
    kept: dict[str, Any] = {}
    _keep(found, "Config", kept)
    _keep(found, "TenantSection", kept)
    return {name: _plain(kept[name]) for name in sorted(kept)}


def _target(value: dict[str, Any]) -> str:
    return str(value["$ref"]).rpartition("/")[2]


def _keep(found: dict[str, Any], name: str, kept: dict[str, Any]) -> None:
    """``name`` and what it refers to."""
    if name not in kept:
        kept[name] = found[name]
        for reference in _references(found[name]):
            _keep(found, reference, kept)


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [_target(node)] if "$ref" in node else []
        return own + [name for value in node.values() for name in _references(value)]
    return [name for value in node for name in _references(value)] if isinstance(node, list) else []


def _plain(node: Any, *, names: bool = False) -> Any:
    """Without titles and defaults: a schema refuses, it does not explain. ``names``: keys are settings."""
    if isinstance(node, list):
        return [_plain(value) for value in node]
    if not isinstance(node, dict):
        return node
    dropped = set() if names else {"title", "default", "description", "format"}
    return {
        key: _plain(value, names=key == "properties" and not names)
        for key, value in node.items()
        if key not in dropped
    }


def write_schema(*, check: bool) -> int:
    """Put ``definitions`` into the schema, or compare."""
    committed = SCHEMA.read_text()
    schema = json.loads(committed)
    schema["$defs"] = definitions()
    text = json.dumps(schema, indent=2) + "\n"
    if not check:
        SCHEMA.write_text(text)
    elif text != committed:
        print(f"{SCHEMA.relative_to(ROOT)} does not follow the settings; run `tools/chart.py schema`")
        return 1
    return 0


def helm() -> Path | None:
    """The program, built from its source where it is missing; None with a word where that fails."""
    found = shutil.which("helm") or shutil.which("helm", path=str(TOOLS))
    if found:
        return Path(found)
    if shutil.which("go") is None:
        return _absent("the chart", "there is neither helm nor Go to build it")
    print(f"building {HELM}: some minutes, once", flush=True)
    environment = {**os.environ, "GOBIN": str(TOOLS)}
    done = subprocess.run(["go", "install", HELM], env=environment, check=False)
    return TOOLS / "helm" if done.returncode == 0 else _absent("the chart", "helm can't be built here")


def promtool() -> Path | None:
    """Prometheus' checker, from Debian's package where it is missing; None where there is none."""
    found = shutil.which("promtool") or shutil.which("promtool", path=str(TOOLS))
    if found:
        return Path(found)
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return _absent("alert rules by promtool", "there is no promtool")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for command in (["apt-get", "-qq", "update"], ["apt-get", "-qq", "download", "prometheus"]):
            if subprocess.run(command, cwd=folder, stderr=subprocess.DEVNULL, check=False).returncode:
                return _absent("alert rules by promtool", "its package can't be had here")
        (package,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        TOOLS.mkdir(parents=True, exist_ok=True)
        for name in ("promtool", "prometheus"):
            shutil.copy(Path(folder, "usr/bin", name), TOOLS / name)
    return TOOLS / "promtool"


def _absent(what: str, why: str) -> None:
    print(f"not checked: {what} ({why})")


def check() -> int:
    """Run the chart's tests with all tools that can be had."""
    helm(), promtool()
    tests = ["tests/unit/test_chart.py", "tests/unit/test_dashboards.py", "tests/e2e/test_prometheus.py"]
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    print("not checked: that a cluster accepts the objects; resources of the Prometheus operator are checked"
          " against the fields we know, and Grafana has not loaded the dashboard", flush=True)  # fmt: skip
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["schema"]:
            sys.exit(write_schema(check=False))
        case ["schema", "--check"]:
            sys.exit(write_schema(check=True))
        case ["check"]:
            sys.exit(check())
        case _:
            sys.exit(__doc__)
