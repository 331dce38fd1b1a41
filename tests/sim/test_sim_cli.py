import json

import pytest
from typer.testing import CliRunner

from server.sim import app

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{i:02d}.0000000,{100 + i},{5 + i % 7}\n" for i in range(40)
)


def sim(*arguments):
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    return path


def test_several_configurations_give_one_table(trace_file):
    result = sim(trace_file, "--compare", "fcfs", "--compare", "priority:watermark=0.1", "--json", "-")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert [r["name"] for r in body["reports"]] == ["fcfs", "priority:watermark=0.1"]
    assert all(r["num_served"] == 40 for r in body["reports"])
    assert [c["name"] for c in body["reports"][0]["classes"]] == ["interactive", "batch"]


def test_the_table_shows_every_class(trace_file):
    result = sim(trace_file, "--limit", 30, "--policy", "fcfs")
    assert result.exit_code == 0
    assert "interactive" in result.stdout
    assert "makespan" in result.stdout


def test_both_drivers_report_the_same(trace_file):
    bodies = [
        json.loads(sim(trace_file, "--driver", driver, "--json", "-").stdout)["reports"][0]
        for driver in ("direct", "engine")
    ]
    assert bodies[0]["num_steps"] == bodies[1]["num_steps"]
    assert bodies[0]["makespan_s"] == pytest.approx(bodies[1]["makespan_s"])


def test_json_is_written_beside_the_table(trace_file, tmp_path):
    path = tmp_path / "out.json"
    assert sim(trace_file, "--limit", 5, "--json", path).exit_code == 0
    assert json.loads(path.read_text())["reports"][0]["num_requests"] == 5


def test_a_made_up_mix_needs_no_file():
    result = sim("steady", "--duration", 20, "--profile", "h100", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["reports"][0]["num_refused"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such-mix"], "steady"),
        (["steady", "--profile", "tpu"], "rtx4090"),
        (["steady", "--policy", "nonsense"], "priority"),
        (["steady", "--discipline", "nonsense"], "discipline"),
        (["steady", "--compare", "nonsense"], "fcfs"),
        (["steady", "--set", "speed=9"], "speed"),
        (["steady", "--classes", "vip=1"], "interactive"),
        (["steady", "--classes", "interactive"], "CLASS=SHARE"),
        (["steady", "--driver", "bicycle"], "direct"),
        (["steady", "--target", "batch=x"], "TTFT_S"),
        (["steady", "--target", "batch=nan/1"], "greater than 0"),
        (["steady", "--target", "batch=1/-1"], "greater than 0"),
        (["steady", "--scale", "inf"], "scale must be greater than 0 and finite"),
        (["steady", "--scale", "1e-300"], "within 1e+09 s"),
        (["steady", "--duration", "inf"], "--duration"),
        (["steady", "--duration", "nan"], "--duration"),
        (["steady", "--duration", "1e12"], "--duration"),
        (["steady", "--num-blocks", "99999999999"], "--num-blocks"),
        (["steady", "--set", "policy=fcfs"], "must leave the policy"),
        (["steady", "--set", "tenants=a"], "is no setting"),
        (["steady", "--set", "watermark=nan"], "below 1"),
        (["steady", "--set", "max_chunk_tokens=1e3"], "must be int"),
    ],
)
def test_wrong_usage_is_explained_and_exits_with_2(arguments, says):
    result = sim(*arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_a_pool_in_which_nothing_fits_refuses_all_and_takes_no_time():
    result = sim("steady", "--duration", 20, "--num-blocks", 1, "--json", "-")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)["reports"][0]
    assert report["num_refused"] == report["num_requests"] > 0
    assert report["makespan_s"] == report["requests_per_s"] == 0
