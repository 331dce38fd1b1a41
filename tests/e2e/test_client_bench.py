"""``vorrangctl bench`` against a real server with the scripted runner."""

import asyncio

import pytest
from typer.testing import CliRunner

from clients.python.cli import main
from tests.support.openai_server import openai_server
from tests.support.process import server_process
from tests.support.workloads import two_classes
from workloads.arrivals import Arrival
from workloads.records import RequestRecord, Run, read_runs, write_runs

WORKLOAD = two_classes("constant", 3, interactive=(10.0, 20, 5), batch=(10.0, 40, 8))


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


@pytest.mark.slow
def test_another_server_is_driven_with_the_same_workload(tmp_path):
    async def main_():
        path, kept, page = tmp_path / "w.toml", tmp_path / "kept.jsonl", tmp_path / "page.html"
        path.write_text(WORKLOAD)
        async with openai_server(0.001) as server:
            result = await asyncio.to_thread(
                bench, path, "--openai", server.url, "--openai-model", "m", "--openai-levels",
                "--duration", 0.5, "--name", "other", "--records", kept, "-o", page,
            )  # fmt: skip
        assert result.exit_code == 0, result.output
        (made,) = read_runs(kept)
        assert (made.name, len(made.records)) == ("other", 10)
        assert all(record.reason == "length" for record in made.records)
        assert {body["priority"] for body in server.bodies} == {-10, 10}
        assert "other" in page.read_text()

    asyncio.run(main_())


@pytest.mark.slow
def test_requests_that_fail_are_said_and_exit_with_1(tmp_path):
    path, page = tmp_path / "w.toml", tmp_path / "page.html"
    path.write_text(WORKLOAD)
    nobody = ("--openai", "http://127.0.0.1:1", "--openai-model", "m", "--duration", 0.3, "-o", page)
    result = bench(path, *nobody)
    assert result.exit_code == 1, result.output
    assert "6 of 6 requests failed:" in result.output
    assert page.exists()
    assert bench(path, *nobody, "--max-failed", 1).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--openai", "ftp://x", "--openai-model", "m"], "--openai must be an http or https address"),
        (["--openai", "http://x"], "--openai-model must name the model"),
        (["--openai", "http://x", "--openai-model", "m", "--adapter", "a"], "--openai-model names adapters"),
        (["--openai", "http://x", "--openai-model", "m", "--openai-prompts", "x"], "tokens or words"),
    ],
)
def test_what_keeps_another_server_from_being_driven_is_said(arguments, said):
    result = bench("urgent-flood", *arguments)
    assert result.exit_code == 2
    assert said in result.output
