import math
import re
import sys
from html.parser import HTMLParser

import pytest

from report import plots, style
from report.page import Facts, knee, plots_of, write_report
from report.summary import NUM_POINTS, at, band, pooled_curve, rates_of, summarise
from workloads.arrivals import Arrival
from workloads.records import RequestRecord, Run, Sample
from workloads.statistics import Target


def record(index, at_s, ttft_s, tpot_s, *, level=-10, num_tokens=11):
    made = RequestRecord(Arrival(index, at_s, 100, num_tokens, level), num_output_tokens=num_tokens)
    made.first_token_s = at_s + ttft_s
    made.last_token_s = made.first_token_s + tpot_s * (num_tokens - 1)
    made.reason = "length"
    return made


def run(name, rate, seed=0, ttft_s=0.1):
    records = [record(i, i / rate, ttft_s * (1 + i % 5), 0.02, level=-10 if i % 2 else 10) for i in range(40)]
    samples = [Sample(t / 10, t % 7, t % 3, 0.5, t) for t in range(60)]
    figures = {"num_computed_tokens": 1000, "num_recomputed_tokens": 25}
    return Run(name, "test", rate, seed, figures=figures, records=records, samples=samples)


def summaries():
    return [
        summarise(run(name, rate, seed, ttft_s * (1 + 0.05 * seed)))
        for name, ttft_s in (("fcfs", 0.5), ("priority", 0.1))
        for rate in (2.0, 4.0, 8.0)
        for seed in range(3)
    ]


def test_a_run_is_boiled_down_to_figures_and_curves():
    summary = summarise(run("x", 4.0))
    assert (summary.num_requests, summary.num_served) == (40, 40)
    assert summary.recompute_tax == 0.025
    assert summary.of_class("interactive").num_requests == summary.of_class("batch").num_requests == 20
    assert summary.of_class("standard") is None
    curve = summary.curves["interactive"]["ttft"]
    assert len(curve) == NUM_POINTS
    assert (curve[0], curve[-1]) == (pytest.approx(0.1), pytest.approx(0.5))
    assert list(curve) == sorted(curve)
    assert summary.output_tokens_per_s == pytest.approx(440 / summary.makespan_s)


def test_what_was_not_served_or_came_late_is_not_goodput():
    one = run("x", 4.0)
    one.records[1].num_output_tokens = 3  # interactive, cut short
    one.records[3].error = "QUEUE_FULL"
    one.records[3].num_output_tokens = 0
    one.records[3].first_token_s = one.records[3].last_token_s = None
    summary = summarise(one, {"interactive": Target(0.25, 1.0)})
    late = sum(0.1 * (1 + i % 5) > 0.25 for i in range(40) if i % 2 and i not in (1, 3))
    assert summary.of_class("interactive").num_good == 20 - 2 - late
    assert summary.errors == {"QUEUE_FULL": 1}


def test_the_tax_of_a_live_run_is_made_of_its_records():
    one = run("x", 4.0)
    one.figures = {}
    one.records[0].num_recomputed_tokens = 50
    assert summarise(one).recompute_tax == pytest.approx(50 / (40 * 110 + 50))


def test_bands_are_students():
    found = band([1.0, 2.0, 3.0], least=-math.inf)
    assert found.mean == 2.0
    assert found.high - 2.0 == pytest.approx(4.303 / math.sqrt(3))
    assert band([1.0, 2.0, 3.0]).low == 0.0  # a rate is never negative
    assert band([0.7]).low == band([0.7]).high == 0.7
    assert band([]) is None
    wide = band([0.1, 10.0], in_logarithms=True)
    assert wide.mean == pytest.approx(1.0)
    assert 0 < wide.low < 0.1


def test_rates_that_are_nearly_the_same_are_one_and_seeds_are_pooled():
    runs = [summarise(run("x", rate, seed)) for seed, rate in enumerate((4.0, 4.03, 8.0))]
    assert rates_of(runs) == [4.0, 8.0]
    assert [s.seed for s in at(runs, "x", 4.0)] == [0, 1]
    assert len(pooled_curve(runs, "batch", "tpot")) == NUM_POINTS
    assert pooled_curve(runs, "standard", "tpot") == ()


def test_the_rate_that_is_shown_is_the_one_that_tells_policies_apart():
    assert knee(summaries()) == 8.0
    good = [summarise(run("a", rate)) for rate in (2.0, 4.0)]
    bad_at_two = [summarise(run("b", 2.0, ttft_s=3.0)), summarise(run("b", 4.0))]
    assert knee(good + bad_at_two) == 2.0


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.cells = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [
            v for k, v in attributes if k in ("src", "href", "xlink:href") and not v.startswith("#")
        ]

    def handle_data(self, data):
        self.cells.append(data)


@pytest.mark.slow
def test_the_page_is_one_file_with_every_plot_and_how_it_was_made(tmp_path):
    facts = Facts("A <title>", "azure", "simulated", "vorrang sim report x", {"vorrang": "0.1"}, ("A note.",))
    write_report(tmp_path / "r.html", facts, summaries())
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == len(plots_of(summaries())) == 8
    assert page.links == []
    assert "<script" not in text
    assert "A &lt;title&gt;" in text
    for needed in ("vorrang sim report x", "vorrang 0.1", "A note.", "0, 1, 2", "first token in 1 s"):
        assert needed in text
    # Ink is the page's own, so that it suits light, dark and print.
    assert "var(--ink)" in text
    assert "#12345" not in text
    assert page.tags.count("tr") == 1 + 2 * 3 * 2  # policies, rates, classes


def test_a_single_run_has_only_the_plots_it_can_fill():
    headings = [plot.heading for plot in plots_of([summarise(run("x", 4.0))])]
    assert "Goodput and attainment against offered rate" not in headings
    assert "Through the run" in headings
    assert plots_of([]) == []


def test_the_same_plot_gives_the_same_text():
    assert len({style.svg(plots.recompute_tax(summaries()), "name") for _ in range(2)}) == 1


def lines(axis):
    return {line.get_label(): line for line in axis.get_lines() if not line.get_label().startswith("_")}


def test_lines_hold_the_means_over_the_seeds():
    figure = plots.against_rate(summaries())
    interactive = next(a for a in figure.axes if a.get_title() == "interactive: share within target")
    assert list(lines(interactive)) == ["fcfs", "priority"]
    drawn = lines(interactive)["fcfs"]
    assert list(drawn.get_xdata()) == [2.0, 4.0, 8.0]
    shares = [s.of_class("interactive").attainment for s in summaries() if s.name == "fcfs"][:3]
    assert drawn.get_ydata()[0] == pytest.approx(sum(shares) / 3)


def test_cdfs_hold_the_curves_by_class():
    figure = plots.latency_cdfs(summaries(), "tpot", 4.0)
    assert [axis.get_title() for axis in figure.axes] == ["interactive", "batch"]
    drawn = lines(figure.axes[0])["priority"]
    assert drawn.get_xdata()[100] == pytest.approx(20.0)  # ms
    assert drawn.get_ydata()[100] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_a_plot_may_be_a_file_of_its_own(tmp_path, dark):
    style.save(plots.recompute_tax(summaries()), tmp_path / "p.svg", dark=dark)
    text = (tmp_path / "p.svg").read_text()
    assert not re.search("#12345", text)
    assert ("#e8e8e8" if dark else "#222222") in text


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(style.PlotsUnavailable, match=r"pip install 'vorrang\[report\]'"):
        plots.recompute_tax(summaries())
