import re
import subprocess
import sys

import psutil
import pytest
from typer.testing import CliRunner

from engine.scheduler.config import SchedulerConfig
from engine.sim import sweep as sweep_module
from engine.sim.profiles import fixed_step, profile_named
from engine.sim.simulator import simulate
from engine.sim.sweep import Cell, Source, Sweep, run_cell, run_sweep
from report.summary import summarise
from server.sim import app
from tests.support.process import environment
from tests.support.workloads import two_classes
from workloads.errors import InvalidWorkload

WORKLOAD = two_classes("poisson", 20, interactive=(2.0, 50, 20), batch=(4.0, 100, 40))


@pytest.fixture
def workload_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(WORKLOAD)
    return path


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.mark.deep
def test_policies_rates_and_seeds_become_one_page(workload_file, tmp_path):
    page = tmp_path / "r.html"
    result = report(
        workload_file, "--policies", "fcfs,priority", "--rates", "6,60", "--seeds", 2, "--processes", 1,
        "--profile", "rtx4090", "-o", page,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "8 runs" in result.output
    text = page.read_text()
    assert text.count("<svg") == 8
    assert re.findall(r'<tr class="first"><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>', text) == [
        ("6", "fcfs"), ("6", "priority"), ("60", "fcfs"), ("60", "priority"),
    ]  # fmt: skip
    assert "0, 1" in text


def cell(rate_rps, seed=0, name="priority"):
    return Cell(name, SchedulerConfig(), rate_rps, seed)


def test_a_cell_runs_at_its_rate_and_samples_the_scheduler(workload_file):
    sweep = Sweep(Source(str(workload_file)), fixed_step(0.02, 1000), None, ())
    slow, fast = (run_cell(sweep, cell(rate)) for rate in (10.0, 20.0))
    assert len(slow.records) == len(fast.records)
    last = [made.records[-1].request.arrival_s for made in (slow, fast)]
    assert last[0] == pytest.approx(2 * last[1])
    assert 100 < len(slow.samples) <= 310  # they go on while what arrived last is served
    assert max(sample.num_running for sample in fast.samples) == 16
    assert 0 < max(sample.kv_use for sample in fast.samples) <= 1
    assert fast.samples == sorted(fast.samples, key=lambda sample: sample.time_s)


def test_seeds_draw_other_workloads_and_the_same_seed_the_same(workload_file):
    sweep = Sweep(Source(str(workload_file)), fixed_step(0.02, 1000), None, ())
    first, again, other = (summarise(run_cell(sweep, cell(6.0, seed))) for seed in (1, 1, 2))
    assert first == again
    assert first.curves != other.curves


@pytest.mark.slow
def test_what_makes_the_same_steps_is_simulated_once_and_has_every_name(workload_file, monkeypatch):
    simulated = []

    def counting(workload, runner, config, **more):
        simulated.append(config.policy)
        return simulate(workload, runner, config, **more)

    monkeypatch.setattr(sweep_module, "simulate", counting)
    cells = [
        Cell(name, SchedulerConfig(policy=name), 20.0, seed)
        for name in ("priority", "fair")
        for seed in (0, 1)
    ]
    for num_tenants, num_simulated in ((0, 2), (2, 4)):
        simulated.clear()
        source = Source(str(workload_file), tenants=num_tenants)
        made = dict(run_sweep(Sweep(source, fixed_step(0.02, 1000), None, cells), summarise, num_processes=1))
        assert len(simulated) == num_simulated
        assert made.keys() == set(cells)
        assert all(summary.name == cell.name and summary.seed == cell.seed for cell, summary in made.items())


@pytest.mark.deep
def test_processes_beside_each_other_give_what_one_gives(workload_file):
    cells = [cell(rate, seed) for rate in (6.0, 20.0) for seed in (0, 1)]
    sweep = Sweep(Source(str(workload_file)), profile_named("h100"), None, cells)
    alone, together = (dict(run_sweep(sweep, summarise, num_processes=n)) for n in (1, 2))
    assert alone == together


@pytest.mark.slow
def test_no_process_is_left_behind_when_the_one_that_started_them_is_killed(workload_file, tmp_path):
    arguments = ["report", workload_file, "--rates", "6,20", "--seeds", 100, "--processes", 2]
    command = [
        sys.executable,
        "-m",
        "server.cli",
        "sim",
        *map(str, arguments),
        "-o",
        str(tmp_path / "r.html"),
    ]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as started:
        parent, workers = psutil.Process(started.pid), []
        while len(workers) < 2:
            assert started.poll() is None, "it was over before its workers were seen"
            workers = [child for child in parent.children() if "spawn_main" in " ".join(child.cmdline())]
        started.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    for worker in alive:
        worker.kill()
    assert not alive


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such"], "must be a file or one of"),
        (["steady", "--rates", "x"], "rates must be numbers"),
        (["steady", "--rates", "0"], "rates must be greater than 0"),
        (["steady", "--rates", "1,nan"], "rates must be greater than 0"),
        (["steady", "--rates", "inf"], "rates must be greater than 0"),
        (["steady", "--rates", "1e-300"], "within 1e+09 s"),
        (["steady", "--policies", "nonsense"], "must begin with one of"),
        (["steady", "--profile", "tpu"], "rtx4090"),
        (["steady", "--classes", "vip=1"], "must be one of interactive"),
    ],
)
def test_wrong_usage_is_explained_and_exits_with_2(arguments, says, tmp_path):
    result = report(*arguments, "-o", tmp_path / "r.html")
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
    assert not (tmp_path / "r.html").exists()


def test_a_workload_that_arrives_at_once_has_no_rate(tmp_path):
    path = tmp_path / "w.toml"
    first = WORKLOAD.rpartition("[[stream]]")[0]
    path.write_text(
        first.replace('process = "poisson", rate_rps = 2.0', 'process = "at_once", num_requests = 3')
    )
    sweep = Sweep(Source(str(path)), fixed_step(0.02, 1000), None, ())
    assert len(run_cell(sweep, cell(None)).records) == 3
    with pytest.raises(InvalidWorkload, match="requests arrive over time"):
        run_cell(sweep, cell(5.0))
