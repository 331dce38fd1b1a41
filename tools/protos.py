"""Generate the stubs, or check that what is committed is up to date, clean and compatible.

Usage: ``python tools/protos.py generate | check | generate-go | check-go | pins | lint | breaking``

The versions of all generators are in ``tools/protos.toml``. Python and Go stubs are committed and come from
the same protoc; without Go its subcommands say so and do nothing. Java stubs are made by its build, so all
there is to check is that the build names the pinned versions. ``breaking`` compares with the last release's
tag. ``google/rpc/*.proto`` comes from the googleapis-common-protos package, so nothing foreign is kept in the
repository.
"""

import filecmp
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = "*_pb2*.py*"
GO = ROOT / "clients/go"
GO_MODULE = "github.com/vorrang/vorrang/clients/go"
PINS: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RELEASES = "v[0-9]*"
_POM = "{http://maven.apache.org/POM/4.0.0}"


def protoc(*arguments: str, protos: Path = PROTOS) -> None:
    """Run the bundled protoc over all sources."""
    includes = [f"-I{protos}", *_includes()]
    command = [sys.executable, "-m", "grpc_tools.protoc", *includes, *arguments, *_sources(protos)]
    subprocess.run(command, check=True, cwd=ROOT)


def _sources(protos: Path) -> list[str]:
    return sorted(path.relative_to(protos).as_posix() for path in (protos / "vorrang/v1").glob("*.proto"))


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
    pins = PINS["go"].values()
    plugins = ROOT / "build/go-plugins" / "-".join(plugin.rpartition("@")[2] for plugin in pins)
    for plugin in pins:
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


def pins() -> int:
    """Hold what generates, wherever it is named, to ``protos.toml``."""
    wrong = [
        f"{what} is {found or 'not there'}, not {wanted}"
        for what, found, wanted in _pinned()
        if found != wanted
    ]
    for line in wrong:
        print(line)
    print("the generators are the pinned ones" if not wrong else "tools/protos.toml says which are wanted")
    return bool(wrong)


def _pinned() -> list[tuple[str, str, str]]:
    """What is looked at, the version found there, and the pinned one."""
    found = [
        (f"{name} of this environment", version(name), wanted)
        for table in ("python", "lint")
        for name, wanted in PINS[table].items()
    ]
    runtime = re.search(r"google\.golang\.org/protobuf (\S+)", (GO / "go.mod").read_text())
    wanted = PINS["go"]["protoc-gen-go"].rpartition("@")[2]
    found.append(("protobuf in clients/go/go.mod", runtime[1] if runtime else "", wanted))
    return found + _pinned_in(ROOT / "clients/java/pom.xml")


def _pinned_in(pom: Path) -> list[tuple[str, str, str]]:
    project = ElementTree.parse(pom).getroot()
    properties = {
        str(p.tag).removeprefix(_POM): p.text or "" for p in project.iterfind(f"{_POM}properties/*")
    }

    def text(element: ElementTree.Element, name: str) -> str:
        raw = (element.findtext(f".//{_POM}{name}") or "").strip()
        return re.sub(r"\$\{(.+?)\}", lambda match: properties.get(match[1], match[0]), raw)

    maker = next(p for p in project.iter(f"{_POM}plugin") if text(p, "artifactId") == "protobuf-maven-plugin")
    plugins = {text(p, "artifactId"): text(p, "version") for p in maker.iter(f"{_POM}binaryMavenPlugin")}
    java = PINS["java"]
    name = "protoc-gen-grpc-java"
    return [
        ("protoc in clients/java/pom.xml", text(maker, "protocVersion"), java["protoc"]),
        (f"{name} in clients/java/pom.xml", plugins.get(name, ""), java[name]),
        (
            "protobuf-maven-plugin in clients/java/pom.xml",
            (maker.findtext(f"{_POM}version") or "").strip(),
            java["protobuf-maven-plugin"],
        ),
    ]


def image(out: Path, protos: Path = PROTOS) -> Path:
    """Write a descriptor set that holds the imports too, which buf can read without a network."""
    protoc("--include_imports", "--include_source_info", f"--descriptor_set_out={out}", protos=protos)
    return out


def _buf(command: str, *arguments: str) -> int:
    buf = Path(sys.executable).parent / "buf"
    config = ["--config", str(ROOT / "buf.yaml")]
    return subprocess.run([str(buf), command, *arguments, *config], check=False, cwd=ROOT).returncode


def lint() -> int:
    """Run ``buf lint``."""
    with tempfile.TemporaryDirectory() as folder:
        only_ours = [argument for source in _sources(PROTOS) for argument in ("--path", source)]
        return _buf("lint", str(image(Path(folder) / "vorrang.binpb")), *only_ours)


def breaking() -> int:
    """Run ``buf breaking`` against the last release before or at this commit; says so when there is none."""
    git = ["git", "-C", str(ROOT)]
    tag = subprocess.run(
        [*git, "describe", "--tags", "--abbrev=0", "--match", RELEASES],
        capture_output=True,
        text=True,
        check=False,
    )
    if tag.returncode:
        print("there is no release to compare the protos with")
        return 0
    release = tag.stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "release.tar"
        subprocess.run([*git, "archive", f"--output={archive}", release, "protos"], check=True)
        shutil.unpack_archive(archive, folder, filter="data")
        before = image(Path(folder) / "before.binpb", Path(folder) / "protos")
        now = image(Path(folder) / "now.binpb")
        # Only ours: the imports come with other packages, and change with them.
        only_ours = ("--exclude-imports", "--against", str(before))
        status = _buf("breaking", str(now), *only_ours)
    print(f"the protos {'break' if status else 'are compatible with'} {release}")
    return status


def main(arguments: list[str]) -> int:
    """Do what the command line says; the exit status."""
    match arguments:
        case ["generate"]:
            generate()
        case ["check"]:
            return check()
        case ["generate-go"]:
            if has_go():
                generate_go()
        case ["check-go"]:
            return check_go() if has_go() else 0
        case ["pins"]:
            return pins()
        case ["lint"]:
            return lint()
        case ["breaking"]:
            return breaking()
        case _:
            sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
