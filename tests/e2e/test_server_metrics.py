"""Metrics over HTTP, spans, and the event loop: what an operator sees from outside."""

import asyncio
import contextlib
import re
import sys
import urllib.request
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

import server.event_loop
import server.metrics_http
import server.metrics_port
import server.tracing
from engine.request import RequestId, RequestSpec
from server.identity import hash_of
from server.metrics import MAX_TENANT_LABELS, OTHER_TENANTS, TABLE, Metrics
from server.metrics_http import MAX_CONNECTIONS
from server.sections import TracingSection
from server.settings import SettingsError
from tests.support import canaries
from tests.support.process import server_process
from tests.support.server import HeldRunner, running_server
from tests.support.wire import open_session, refused, settled, spec, stub
from vorrang.v1 import generation_pb2 as gen

METRICS: dict[str, object] = {"metrics.listen": "127.0.0.1:0"}


def read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        return response.read().decode()


async def scrape(app: Any) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, in the order of the table."""
    text = await asyncio.to_thread(read, app.metrics_address)
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            bound = labels.pop("le", None)
            names = TABLE[family.name].labels if family.name in TABLE else sorted(labels)
            key = (sample.name, *(labels[name] for name in names), *([bound] if bound else []))
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


@pytest.mark.asyncio
async def test_everything_that_happens_to_requests_is_counted_once() -> None:
    token = canaries.TOKEN
    settings = {
        **METRICS,
        "tenants.acme.token_hashes": [hash_of(token)],
        "scheduler.max_running_requests": 1,
        "scheduler.resume_quantum_tokens": 0,
    }
    runner = HeldRunner(64, 16)
    metadata = (("authorization", f"Bearer {token}"),)
    async with (
        running_server(settings, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        runner.hold()
        prompt = list(range(1, 41))
        batch = stub(channel).Generate(
            gen.GenerateRequest(spec=spec(prompt, level=10, max_tokens=6)), metadata=metadata
        )
        await runner.held.wait()
        standing = await scrape(app)
        assert standing["vorrang_requests", "batch", "acme", "running"] == 1
        assert standing["vorrang_seats_free",] == 0
        assert standing["vorrang_kv_blocks_free",] == 61
        assert standing["vorrang_calls",] == 1
        urgent = stub(channel).Generate(
            gen.GenerateRequest(spec=spec(prompt, level=-10, max_tokens=3)), metadata=metadata
        )
        await settled(lambda: app.statistics().num_requests == 2)
        runner.release()
        outputs = [len((await call).token_ids) for call in (batch, urgent)]
        await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec())))
        bad = gen.GenerateRequest(spec=spec(temperature=-1.0))
        await refused(stub(channel).Generate(bad, metadata=metadata))
        now = await scrape(app)
    assert outputs == [6, 3]
    assert now["vorrang_requests_accepted_total", "batch", "acme"] == 1
    assert now["vorrang_requests_ended_total", "batch", "acme", "length"] == 1
    assert now["vorrang_output_tokens_total", "batch", "acme"] == 6
    assert now["vorrang_output_tokens_total", "interactive", "acme"] == 3
    assert now["vorrang_prompt_tokens_total", "batch", "acme"] == 40
    assert now["vorrang_cached_tokens_total", "batch", "acme"] == 0
    assert now["vorrang_preemptions_total", "batch", "acme", "seats"] == 1
    assert now["vorrang_recomputed_tokens_total", "batch", "acme"] > 0
    assert now["vorrang_refusals_total", "", "UNAUTHENTICATED"] == 1
    assert now["vorrang_refusals_total", "acme", "INVALID_REQUEST"] == 1
    for name in ("queue", "ttft", "tpot", "request"):
        assert now[f"vorrang_{name}_seconds_count", "batch", "acme"] == 1
    assert now["vorrang_token_gap_seconds_count", "batch", "acme"] == 5
    assert now["vorrang_token_gap_seconds_bucket", "batch", "acme", "+Inf"] == 5
    num_steps = now["vorrang_step_seconds_count",]
    assert num_steps == now["vorrang_step_tokens_count", "decode"] >= 9
    assert now["vorrang_step_tokens_sum", "decode"] <= 9
    recomputed = now["vorrang_recomputed_tokens_total", "batch", "acme"]
    prompts = 80 - now["vorrang_cached_tokens_total", "interactive", "acme"]
    assert now["vorrang_step_tokens_sum", "prefill"] >= prompts + recomputed - 9
    assert now["vorrang_runner_restarts_total",] == 0
    assert now["vorrang_serving",] == 1


@pytest.mark.asyncio
async def test_an_empty_queue_is_told_as_zero_rather_than_not_at_all() -> None:
    # An autoscaler takes a series that is not there for a broken one, and scales nothing down.
    token = canaries.TOKEN
    settings = {**METRICS, "tenants.acme.token_hashes": [hash_of(token)]}
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        before = await scrape(app)
        assert before["vorrang_requests", "interactive", "", "waiting"] == 0
        await stub(channel).Generate(
            gen.GenerateRequest(spec=spec(level=10)), metadata=(("authorization", f"Bearer {token}"),)
        )
        after = await scrape(app)
    assert {after["vorrang_requests", "batch", "acme", state] for state in server.metrics_port.STATES} == {0}


@pytest.mark.asyncio
async def test_the_table_of_names_is_what_is_served() -> None:
    async with running_server(METRICS) as app, grpc.aio.insecure_channel(app.address) as channel:
        await stub(channel).Generate(gen.GenerateRequest(spec=spec()))
        text = await asyncio.to_thread(read, app.metrics_address)
    families = {f.name: f for f in text_string_to_metric_families(text) if f.name.startswith("vorrang_")}
    assert {(f.name, f.type) for f in families.values()} == {(m.name, m.kind) for m in TABLE.values()}
    for name, family in families.items():
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(TABLE[name].labels), sample
    assert "process_resident_memory_bytes" in text


def test_names_follow_the_customs_of_prometheus() -> None:
    for name, metric in TABLE.items():
        assert re.fullmatch(r"vorrang_[a-z_]+", name)
        assert metric.text.endswith(".")
        assert not name.endswith("_total")
        if metric.kind == "histogram":
            assert list(metric.bounds) == sorted(set(metric.bounds))
            assert name.endswith(("_seconds", "_tokens", "_requests"))


def test_the_number_of_tenants_with_labels_is_bounded() -> None:
    metrics = Metrics()
    for number in range(MAX_TENANT_LABELS + 50):
        metrics.submitted(RequestSpec(RequestId(f"r{number}"), (1,), tenant=f"t{number}"))
    labels = {
        sample.labels["tenant"]: sample.value
        for family in metrics.families({})
        for sample in family.samples
        if sample.name == "vorrang_requests_accepted_total"
    }
    assert len(labels) == MAX_TENANT_LABELS + 1
    assert labels[OTHER_TENANTS] == 50


@pytest.mark.asyncio
async def test_a_stalled_credit_is_counted() -> None:
    metrics = Metrics()
    metrics.credit_stalled(RequestSpec(RequestId("r"), (1,), level=10))
    (sample,) = [
        s for f in metrics.families({}) for s in f.samples if s.name == "vorrang_credit_stalls_total"
    ]
    assert (sample.labels, sample.value) == ({"class": "batch", "tenant": ""}, 1)


@pytest.mark.asyncio
async def test_a_blocked_event_loop_still_answers_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.metrics_port, "LOOK_S_MAX", 0.05)
    async with running_server(METRICS) as app:
        text = read(app.metrics_address)  # on the event loop itself, which therefore stands still
        assert "vorrang_step_seconds_count 0.0" in text
        assert "\nvorrang_seats 16" not in text
        assert "\nvorrang_seats 16.0" in await asyncio.to_thread(read, app.metrics_address)


@pytest.mark.asyncio
async def test_slow_clients_hold_few_connections_and_none_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_server(METRICS) as app:
        host, _, port = app.metrics_address.rpartition(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS)]
        for _, writer in slow:
            writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")  # and no end of it
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            assert await reader.read() == b""  # one too many
        writer.close()
        monkeypatch.setattr(server.metrics_http, "CONNECTION_S_MAX", 0.05)
        async with asyncio.timeout(20):
            for reader, writer in slow:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()
        monkeypatch.undo()
        async with asyncio.timeout(20):
            while True:  # their threads give the places back a moment after
                with contextlib.suppress(OSError):
                    assert ("vorrang_seats",) in await scrape(app)
                    break


@pytest.mark.asyncio
async def test_a_client_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.metrics_http._Handler, "timeout", 0.1)
    async with running_server(METRICS) as app:
        host, _, port = app.metrics_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.asyncio
async def test_a_port_in_use_is_one_clear_line() -> None:
    async with running_server(METRICS) as app:
        with pytest.raises(BaseExceptionGroup) as caught:
            async with running_server({"metrics.listen": app.metrics_address}):
                pass
    (error,) = caught.value.exceptions
    assert isinstance(error, SettingsError)
    assert "is it in use?" in str(error)


@pytest.mark.asyncio
async def test_a_request_is_a_span_under_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    original = server.tracing.RequestSpans

    def spans(section: TracingSection) -> Any:
        return original(section, exporter)

    monkeypatch.setattr("server.app.RequestSpans", spans)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with (
        running_server({"tracing.otlp_endpoint": "http://127.0.0.1:1"}) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        await stub(channel).Generate(
            gen.GenerateRequest(spec=spec([1, 2], level=-10, max_tokens=3)),
            metadata=(("traceparent", f"00-{trace}-{parent}-01"),),
        )
        async with open_session(channel) as session:
            await session.start("a")
            await session.end_of("a")
    first, second = exporter.get_finished_spans()
    assert (first.name, second.name) == ("vorrang.request", "vorrang.request")
    assert first.parent is not None
    assert f"{first.context.trace_id:032x}" == trace
    assert f"{first.parent.span_id:016x}" == parent
    assert second.parent is None
    assert [event.name for event in first.events] == ["started", "first_token"]
    attributes = dict(first.attributes or {})
    assert attributes["vorrang.finish_reason"] == "length"
    assert (attributes["vorrang.prompt_tokens"], attributes["vorrang.output_tokens"]) == (2, 3)
    assert attributes["vorrang.level"] == -10


def test_without_opentelemetry_a_configured_endpoint_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"install vorrang\[otel\]"):
        server.tracing.RequestSpans(TracingSection(otlp_endpoint="http://127.0.0.1:1"))


def test_without_uvloop_asking_for_it_is_an_error_and_auto_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with pytest.raises(SettingsError, match=r"install vorrang\[uvloop\]"):
        server.event_loop.factory("uvloop")
    assert server.event_loop.factory("auto") is server.event_loop.factory("asyncio") is asyncio.new_event_loop


@pytest.mark.slow
def test_the_ready_line_says_event_loop_transport_and_ports() -> None:
    with server_process("--metrics-listen", "127.0.0.1:0", "--control-listen", "127.0.0.1:0") as process:
        pattern = r", uvloop, plaintext, control on 127.0.0.1:\d+, metrics on (127.0.0.1:\d+)$"
        match = re.search(pattern, process.ready_line.strip())
        assert match, process.ready_line
        assert "vorrang_serving 1.0" in read(match[1])
        process.terminate()
        assert process.wait() == 0
