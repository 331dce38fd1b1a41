"""The guide to the Python client: every program and every command on the page is run as it stands."""

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.python.auth import hash_token
from tests.support.certificates import certificates
from tests.support.process import ROOT, environment, server_process

PAGE = (ROOT / "docs/clients/python.md").read_text()
PLAIN, SECURE = "127.0.0.1:50051", "vorrang.example.org:50051"
TOKEN = "a-token-of-the-guide-0123456789"

#: Runs one program after the other in one process, as files of their own would.
RUN_ALL = """
import sys
for number, path in enumerate(sys.argv[1:], 1):
    print(f"--- {number}", flush=True)
    exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
"""

#: What each program prints at least, in order.
SAYS = [
    r"LENGTH \d+ tokens|STOP \d+ tokens",
    r"queued behind \d+ at level -10\n(.|\n)*level 0\n\d+ times preempted",
    r"CANCELLED\nTIME_LIMIT\ntoo late\n",
    r"12 tokens, four at a time",
    r"Accepted\(",
    r"sampling.temperature must be",
    r"level=3, capped=True, requested_level=-10",
    r"\]\n$",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the programs read."""
    files = certificates(tmp_path)
    own = files.ca.issue_cert("client@example.org", common_name="robot")
    own.private_key_pem.write_to_path(tmp_path / "client.key")
    (tmp_path / "client.pem").write_bytes(b"".join(part.bytes() for part in own.cert_chain_pems))
    (tmp_path / "token").write_text(TOKEN + "\n")
    # Nothing is far ahead of its reader, so that what a program leaves unread for a while is still there.
    (tmp_path / "plain.toml").write_text("[session]\ncredit_tokens = 16\n")
    (tmp_path / "secure.toml").write_text(
        f'[tls]\ncertificate = "{tmp_path}/server.pem"\nprivate_key = "{tmp_path}/server.key"\n'
        f'client_ca = "{tmp_path}/ca.pem"\n'
        f'[tenants.guide]\ntoken_hashes = ["{hash_token(TOKEN)}"]\nmost_urgent_level = 3\n'
    )
    return tmp_path


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[str, str]]:
    """Addresses of a plain server and of one with TLS and tenants."""
    secure = ("--config", str(folder / "secure.toml"))
    ahead = ("--config", str(folder / "plain.toml"))
    with server_process(*ahead) as plain, server_process(*secure) as other:
        yield plain.address, f"localhost:{other.address.rpartition(':')[2]}"


@pytest.mark.slow
def test_the_guide_runs_as_it_stands(folder: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    commands = [
        line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
    ]
    assert len(programs) == len(SAYS)
    assert commands
    with servers(folder) as (plain, secure):
        paths = []
        for number, program in enumerate(programs, 1):
            assert PLAIN in program or SECURE in program
            paths.append(folder / f"program_{number}.py")
            paths[-1].write_text(program.replace(PLAIN, plain).replace(SECURE, secure))
        done = run(folder, sys.executable, "-c", RUN_ALL, *map(str, paths))
        assert done.returncode == 0, done.stdout + done.stderr
        for command in commands:
            program, *words = shlex.split(command)
            assert program == "vorrangctl"
            told = run(folder, sys.executable, "-m", "clients.python.cli", *words, "--target", plain)
            assert told.returncode == 0, told.stderr
            assert "32 tokens" in told.stderr
    printed = re.split(r"^--- \d+\n", done.stdout, flags=re.MULTILINE)[1:]
    for says, text in zip(SAYS, printed, strict=True):
        assert re.search(says, text), (says, text)


def run(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def test_every_error_in_the_guide_is_one_of_the_clients() -> None:
    import clients.python

    table = PAGE.partition("| class | when |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([A-Z]\w+)`", table))
    errors = {
        name
        for name in clients.python.__all__
        if isinstance(each := getattr(clients.python, name), type) and issubclass(each, Exception)
    }
    unnamed = {
        "VorrangError",
        "RequestFailed",
        "NotReady",
        "DuplicateRequestId",
        "UnknownModel",
        "Unimplemented",
    }
    assert named == errors - unnamed


def test_links_lead_somewhere() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / "docs/clients" / path).exists(), path
