"""The built wheel: what is in it, and that its ``kernels`` does not break ``transformers``.

The index has an unrelated distribution named ``kernels`` that transformers
probes for at import; our top-level package of that name must not be taken for it.
"""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.process import server_process

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (path,) = out.glob("vorrang-*.whl")
    return path


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {n for n in top if not n.endswith(".dist-info")} == {
        "server", "engine", "kv", "kernels", "clients", "timeline", "workloads", "report", "vorrang",
    }  # fmt: skip
    assert "vorrang/v1/generation_pb2.py" in names
    assert "kernels/cpu.cpp" in names
    assert "kernels/cpu_threads.hpp" in names
    assert "workloads/ready/urgent-flood.toml" in names
    assert {"clients/py.typed", "vorrang/py.typed"} <= set(names)
    assert not [n for n in names if n.startswith(("clients/go", "clients/java"))]


@pytest.mark.slow
def test_transformers_imports_beside_the_installed_wheel(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The dependencies of this environment, but not its editable install of ours.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    code = (
        "import kernels, sys, pathlib; home = pathlib.Path(kernels.__file__).parents[1]\n"
        "import transformers; from transformers import LlamaForCausalLM, AutoTokenizer\n"
        "from transformers.utils import is_kernels_available\n"
        "import vorrang.v1.generation_pb2, clients.python, kernels.ops\n"
        "print(home); print(is_kernels_available())"
    )
    done = subprocess.run(
        [str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site), "False"]


#: What the installed client is without.
LIGHT = """
import importlib.util, sys
assert not [n for n in ("torch", "numpy", "transformers", "structlog") if importlib.util.find_spec(n)]
import clients.python
assert clients.python.__file__.startswith(sys.prefix), clients.python.__file__
"""


@pytest.mark.slow
def test_the_wheel_alone_generates_without_anything_heavy(wheel, tmp_path):
    """With the base dependencies of this environment, so that no index is needed."""
    python = new_environment(tmp_path)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    install(python, "--no-index", "--no-deps", str(wheel))
    for name in base_dependencies(wheel):
        link(distribution(name), site)
    use(python, tmp_path)


@pytest.mark.deep
def test_the_wheel_installs_alone_from_an_index(wheel, tmp_path):
    python = new_environment(tmp_path)
    install(python, "-c", str(ROOT / "constraints.txt"), str(wheel))
    use(python, tmp_path)


def new_environment(folder: Path) -> Path:
    venv.create(folder / "venv", with_pip=False)
    return folder / "venv/bin/python"


def install(python: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def base_dependencies(wheel: Path) -> set[str]:
    """Names of all distributions the wheel needs without extras."""
    (metadata,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    waiting = list(needed(re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)))
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(needed(distribution(name).requires or []))
    return found


def needed(requirements: list[str]) -> Iterator[str]:
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name.lower()


def link(installed: Distribution, site: Path) -> None:
    """Make an installed distribution visible in another environment."""
    for file in installed.files or ():
        if not file.parts[0].startswith("..") and file.suffix != ".pyc":
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(str(installed.locate_file(file))))


def use(python: Path, folder: Path) -> None:
    """Reach a server of this environment with the client of the other one."""
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with server_process() as server:
        generate = ("generate", "hi", "--target", server.address, "--max-tokens", "4")
        done = [
            subprocess.run(
                command, cwd=folder, env=plain, capture_output=True, text=True, check=False, timeout=60
            )
            for command in (
                (str(python.with_name("vorrangctl")), *generate),
                (str(python), "-c", LIGHT),
            )
        ]
    for each in done:
        assert each.returncode == 0, each.stderr
    assert "4 tokens, LENGTH" in done[0].stderr


def test_the_client_needs_no_serving_dependency(wheel):
    metadata = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    base = {
        line.split()[1].split(">")[0]
        for line in lines
        if line.startswith("Requires-Dist") and "extra" not in line
    }
    assert base == {
        "googleapis-common-protos",
        "grpcio",
        "grpcio-status",
        "protobuf",
        "rich",
        "textual",
        "typer",
    }
