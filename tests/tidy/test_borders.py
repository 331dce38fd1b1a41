"""Who may import whom, what is pure, what is light: held here, not by manners."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run(*command, **more):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **more)


def modules_after_importing(name):
    code = f"import sys, {name}; print(*sys.modules)"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_contracts_hold():
    done = run(str(BIN / "lint-imports"), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["engine.scheduler.scheduler", "kv.block_manager", "kv.prefix_index"])
def test_the_pure_core_pulls_in_nothing_with_time_randomness_or_io(name):
    impure = {"torch", "numpy", "asyncio", "anyio", "grpc", "structlog", "random", "threading", "time"}
    loaded = modules_after_importing(name)
    # Modules the interpreter itself may load at its start don't count.
    assert not (impure & (loaded - modules_after_importing("sys")))


@pytest.mark.slow
def test_the_process_that_computes_needs_no_tokenizer():
    loaded = modules_after_importing("engine.runner.worker, engine.models.registry, engine.models.loader")
    assert not ({"tokenizers", "transformers", "grpc"} & loaded)


def test_the_client_is_light():
    heavy = {"torch", "numpy", "pydantic", "rich", "typer", "server", "engine", "kv", "kernels"}
    assert not (heavy & modules_after_importing("clients.python"))


def test_workloads_need_the_standard_library_alone():
    names = ", ".join(f"workloads.{path.stem}" for path in (ROOT / "workloads").glob("[a-z]*.py"))
    loaded = modules_after_importing(names) - modules_after_importing("sys")
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"workloads"}


def test_kernels_package_is_inert():
    source = (ROOT / "kernels/__init__.py").read_text()
    assert not [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert "__version__" not in source
    assert not (ROOT / "kernels/triton").exists(), "a folder of that name would shadow the real triton"


def test_the_scheduler_reads_no_clock_and_no_randomness():
    for path in [*(ROOT / "engine/scheduler").glob("*.py"), *(ROOT / "kv").glob("*.py")]:
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        assert not names & {"time", "random", "secrets"}, path


def test_the_version_stays_on_the_line_the_kernels_name_was_checked_for():
    assert 'version = "0.1.' in (ROOT / "pyproject.toml").read_text()


def test_failures_are_logged_by_their_places_alone():
    """``exc_info`` and its like format what a request said, and a library's renderer its variables, too."""
    packages = ("server", "engine", "kv", "kernels", "timeline")
    for path in (path for package in packages for path in (ROOT / package).rglob("*.py")):
        if path.name in ("log.py", "failure.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert "exc_info" not in {keyword.arg for keyword in node.keywords}, path
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                assert name not in ("print_exc", "format_exc", "format_exception"), path
                assert name != "exception" or not node.args, path  # a logger's, not a future's
