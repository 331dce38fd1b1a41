"""``vorrangctl bench`` against a real server with the scripted runner."""

import pytest
from typer.testing import CliRunner

from clients.python.cli import main
from tests.support.process import server_process
from workloads.arrivals import Arrival
from workloads.records import RequestRecord, Run, read_runs, write_runs

WORKLOAD = """
name = "small"
duration_s = 3
[[stream]]
class = "interactive"
arrivals = { process = "constant", rate_rps = 10.0 }
prompt_tokens = 20
output_tokens = 5
[[stream]]
class = "batch"
arrivals = { process = "constant", rate_rps = 10.0 }
prompt_tokens = 40
output_tokens = 8
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with server_process(log=tmp_path_factory.mktemp("bench") / "server.log") as server:
        yield server.address


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.mark.deep
def test_two_rates_and_an_earlier_run_become_one_page(address, tmp_path):
    path, page, kept, earlier = (
        tmp_path / name for name in ("w.toml", "r.html", "now.jsonl", "before.jsonl")
    )
    path.write_text(WORKLOAD)
    record = RequestRecord(Arrival(0, 0.0, 20, 5, -10), reason="length")
    for time_s in (0.1, 0.2, 0.3, 0.4, 0.5):
        record.got_tokens(1, time_s)
    write_runs(earlier, [Run("before", "small", 40.0, end_s=0.5, records=[record])])
    result = bench(
        path, "--target", address, "--duration", 0.7, "--rates", "20,40", "--name", "now",
        "--from", earlier, "--records", kept, "-o", page,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    runs = read_runs(kept)
    assert [(made.name, made.offered_rps, len(made.records)) for made in runs] == [
        ("now", 20.0, 14),
        ("now", 40.0, 28),
    ]
    assert all(record.reason == "length" for made in runs for record in made.records)
    text = page.read_text()
    assert text.count("<svg") >= 7
    for needed in ("before", "now", "scripted", "The generator itself was late"):
        assert needed in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing-such"], "must be a file or one of"),
        (["steady", "--rates", "fast"], "rates must be numbers"),
        ([], "workload must be given, or records with --from"),
        (["--from", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_usage_is_one_line_and_exits_with_2(arguments, says, tmp_path):
    result = bench(*arguments, "-o", tmp_path / "r.html")
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())
