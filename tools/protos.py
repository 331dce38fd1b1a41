"""Generate the Python stubs, or check that what is committed is up to date and clean.

Usage: ``python tools/protos.py generate | check | lint``

Stubs come from the oldest supported grpcio-tools (an import fails when the
runtime is older than the generator). ``google/rpc/*.proto`` comes from the
googleapis-common-protos package, so nothing foreign is kept in the repository.
"""

import filecmp
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
SOURCES = sorted(p.relative_to(PROTOS).as_posix() for p in (PROTOS / "vorrang/v1").glob("*.proto"))
GENERATED = "*_pb2*.py*"


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
    """Compare committed stubs with freshly generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {p.name: p for p in (Path(folder) / "vorrang/v1").glob(GENERATED)}
        kept = {p.name: p for p in (PROTOS / "vorrang/v1").glob(GENERATED)}
        stale = sorted(
            name
            for name in fresh.keys() | kept.keys()
            if name not in fresh
            or name not in kept
            or not filecmp.cmp(fresh[name], kept[name], shallow=False)
        )
    for name in stale:
        print(f"protos/vorrang/v1/{name} is not what `make proto` writes")
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
        case ["lint"]:
            sys.exit(lint())
        case _:
            sys.exit(__doc__)
