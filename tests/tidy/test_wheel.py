"""The built wheel: what is in it, and that its ``kernels`` does not break ``transformers``.

The index has an unrelated distribution named ``kernels`` that transformers
probes for at import; our top-level package of that name must not be taken for it.
"""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

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
        "server", "engine", "kv", "kernels", "clients", "workloads", "report", "vorrang",
    }  # fmt: skip
    assert "vorrang/v1/generation_pb2.py" in names
    assert "kernels/cpu.cpp" in names
    assert "workloads/ready/urgent-flood.toml" in names
    assert not [n for n in names if n.startswith(("clients/go", "clients/java"))]


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
