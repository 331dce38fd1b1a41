"""Generate the stubs, or check that what is committed is up to date and clean.

Usage: ``python tools/protos.py generate | check | generate-go | check-go | lint``

Python stubs come from the oldest supported grpcio-tools (an import fails when the
runtime is older than the generator), Go stubs from the same protoc and two plugins
of pinned versions; without Go their subcommands say so and do nothing.
``google/rpc/*.proto`` comes from the googleapis-common-protos package, so nothing
foreign is kept in the repository.
"""

import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
SOURCES = sorted(p.relative_to(PROTOS).as_posix() for p in (PROTOS / "vorrang/v1").glob("*.proto"))
GENERATED = "*_pb2*.py*"
GO = ROOT / "clients/go"
GO_MODULE = "github.com/vorrang/vorrang/clients/go"
GO_PLUGINS = (
    "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.11",
    "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
)


def protoc(*arguments: str) -> None:
    """Run the bundled protoc over all sources."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *_includes(), *arguments, *SOURCES]
    subprocess.run(command, check=True, cwd=ROOT)


def _includes() -> list[str]:
    import google.rpc

    google_rpc = Path(next(iter(google.rpc.__path__)))
    return [f"-I{google_rpc.parent.parent}", f"-I{files('grpc_tools') / '_proto'}"]


def generate(out: Path = PROTOS) -> None:
    """Write ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` below ``out``."""
    protoc(f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}")


def check() -> int:
    """Compare committed Python stubs with freshly generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        return _compare(Path(folder) / "vorrang/v1", PROTOS / "vorrang/v1", GENERATED)


def has_go() -> bool:
    """Whether Go is installed; says so when it is not."""
    if shutil.which("go") is None:
        print("Go is not installed: clients/go is left as it is")
        return False
    return True


def generate_go(out: Path = GO) -> None:
    """Write ``vorrangv1/*.pb.go`` below ``out``."""
    plugins = ROOT / "build/go-plugins" / "-".join(plugin.rpartition("@")[2] for plugin in GO_PLUGINS)
    for plugin in GO_PLUGINS:
        name = plugin.partition("@")[0].rpartition("/")[2]
        if not (plugins / name).exists():
            subprocess.run(["go", "install", plugin], check=True, env={**os.environ, "GOBIN": str(plugins)})
    protoc(
        *(f"--plugin={plugin}" for plugin in sorted(plugins.iterdir())),
        f"--go_out={out}",
        f"--go_opt=module={GO_MODULE}",
        f"--go-grpc_out={out}",
        f"--go-grpc_opt=module={GO_MODULE}",
    )


def check_go() -> int:
    """Compare committed Go stubs with freshly generated ones; says so where the plugins can't be had."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            generate_go(Path(folder))
        except subprocess.CalledProcessError as error:
            if error.cmd[:2] != ["go", "install"]:
                raise
            print(f"clients/go is not checked: {error.cmd[2]} can't be installed here")
            return 0
        return _compare(Path(folder) / "vorrangv1", GO / "vorrangv1", "*.pb.go")


def _compare(fresh_in: Path, kept_in: Path, pattern: str) -> int:
    fresh = {path.name: path for path in fresh_in.glob(pattern)}
    kept = {path.name: path for path in kept_in.glob(pattern)}
    stale = sorted(
        name
        for name in fresh.keys() | kept.keys()
        if name not in fresh or name not in kept or not filecmp.cmp(fresh[name], kept[name], shallow=False)
    )
    for name in stale:
        print(f"{(kept_in / name).relative_to(ROOT)} is not what `make proto` writes")
    print("generated code is up to date" if not stale else "run `make proto`")
    return bool(stale)


def lint() -> int:
    """Run ``buf lint`` over a descriptor set that holds the imports too."""
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "vorrang.binpb"
        protoc("--include_imports", "--include_source_info", f"--descriptor_set_out={image}")
        only_ours = [argument for source in SOURCES for argument in ("--path", source)]
        buf = Path(sys.executable).parent / "buf"
        command = [str(buf), "lint", str(image), "--config", str(ROOT / "buf.yaml"), *only_ours]
        return subprocess.run(command, check=False, cwd=folder).returncode


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["generate"]:
            generate()
        case ["check"]:
            sys.exit(check())
        case ["generate-go"]:
            if has_go():
                generate_go()
        case ["check-go"]:
            sys.exit(check_go() if has_go() else 0)
        case ["lint"]:
            sys.exit(lint())
        case _:
            sys.exit(__doc__)
