"""TLS, mTLS, tokens and tenants over real connections; which services are on which port."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from server.identity import hash_of
from server.settings import SettingsError, load
from server.tls import TlsFiles
from tests.support import canaries
from tests.support.certificates import Certificates, certificates
from tests.support.process import ROOT, environment
from tests.support.server import HeldRunner, running_server
from tests.support.wire import WireSession, open_session, reason_in, refused, settled, spec, stub
from vorrang.v1 import control_pb2, control_pb2_grpc
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio

ACME, OPS = canaries.TOKENS
TENANTS: dict[str, object] = {
    "tenants.acme.token_hashes": [hash_of(ACME)],
    "tenants.acme.most_urgent_level": 0,
    "tenants.acme.default_level": 5,
    "tenants.ops.token_hashes": [hash_of(OPS)],
    "tenants.ops.operator": True,
}


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return certificates(tmp_path)


@contextlib.asynccontextmanager
async def secure(address: str, credentials: grpc.ChannelCredentials) -> AsyncIterator[grpc.aio.Channel]:
    # A fresh pool, or a channel would use a connection that an earlier one made.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        yield channel


async def generate(channel: Any, token: str | None = None, **fields: Any) -> gen.GenerateResponse:
    metadata = bearer(token) if token else ()
    request = gen.GenerateRequest(spec=spec("hi", max_tokens=2, **fields))
    return await stub(channel).Generate(request, metadata=metadata, timeout=20)


async def health(channel: Any) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    return int(answer.status)


async def unavailable(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_tls_serves_and_plaintext_on_its_port_does_not(files: Certificates) -> None:
    async with running_server(files.settings) as app:
        async with secure(app.address, files.client()) as channel:
            assert len((await generate(channel)).token_ids) == 2
        async with grpc.aio.insecure_channel(app.address) as channel:
            await unavailable(channel)
        async with secure(app.address, certificates_of_nobody()) as channel:
            await unavailable(channel)


def certificates_of_nobody() -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())


async def test_with_tls_more_than_loopback_needs_no_flag(files: Certificates) -> None:
    async with running_server({**files.settings, "server.listen": "0.0.0.0:0"}) as app:
        port = app.address.rpartition(":")[2]
        async with secure(f"127.0.0.1:{port}", files.client()) as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_mtls_refuses_who_shows_nothing_or_the_wrong_authority(files: Certificates) -> None:
    settings = {
        **files.mutual_settings,
        "tenants.robots.certificate_subjects": ["CN=robot"],
        "tenants.robots.most_urgent_level": 3,
    }
    async with running_server(settings) as app:
        for credentials in (files.client(), files.client("robot", trustme.CA())):
            async with secure(app.address, credentials) as channel:
                await unavailable(channel)
        async with secure(app.address, files.client("robot")) as channel:
            accepted = (await generate(channel, level=-20)).accepted
            assert (accepted.level, accepted.capped, accepted.requested_level) == (3, True, -20)
        async with secure(app.address, files.client("stranger")) as channel:
            status = await refused(generate(channel))
            assert (status.code, reason_in(status)) == (16, "UNAUTHENTICATED")
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_a_new_certificate_is_served_without_a_restart_and_old_connections_live_on(
    files: Certificates,
) -> None:
    async with running_server(files.settings) as app, secure(app.address, files.client()) as old:
        assert len((await generate(old)).token_ids) == 2
        newer = trustme.CA()
        changed = Certificates(newer, files.folder)
        changed.write_server()
        tls = app.tls
        assert tls is not None
        await settled(lambda: tls.version == 1)
        async with secure(app.address, changed.client()) as channel:
            assert len((await generate(channel)).token_ids) == 2
        async with secure(app.address, files.client()) as channel:
            await unavailable(channel)
        assert len((await generate(old)).token_ids) == 2


@pytest.mark.parametrize(("mode", "warned"), [(0o644, 1), (0o602, 1), (0o620, 1), (0o600, 0), (0o640, 0)])
async def test_a_key_that_is_open_to_others_is_said_in_one_line(
    files: Certificates, mode: int, warned: int
) -> None:
    (files.folder / "server.key").chmod(mode)
    section = load(None, {"server.listen": "127.0.0.1:0", **files.settings}).settings.tls
    with structlog.testing.capture_logs() as logged:
        TlsFiles(section)
    assert [entry["mode"] for entry in logged] == [f"{mode:04o}"] * warned


async def test_the_default_level_that_a_session_is_told_is_the_one_its_requests_get() -> None:
    async with running_server(TENANTS) as app, grpc.aio.insecure_channel(app.address) as channel:
        metadata = (*bearer(ACME), ("x-priority", "-100"))
        async with WireSession(channel, metadata) as session:
            opened = await session.open()
            await session.start("a", spec())
            accepted = await session.event("accepted", "a")
            await session.end_of("a")
        assert (opened.default_level, accepted.level, accepted.requested_level) == (0, 0, -100)


async def test_a_half_written_certificate_changes_nothing(files: Certificates) -> None:
    async with running_server(files.settings) as app:
        tls = app.tls
        assert tls is not None
        (files.folder / "server.pem").write_bytes(b"-----BEGIN CERTIFICATE-----\nhalf")
        assert not tls.reload()
        async with secure(app.address, files.client()) as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        key = (files.folder / "server.key").read_bytes()
        files.write_server()
        (files.folder / "server.key").write_bytes(key)  # of another certificate
        assert not tls.reload()
        files.write_server()
        await settled(lambda: tls.version == 1)


@pytest.mark.parametrize(
    ("what", "content", "message"),
    [
        ("server.pem", None, "can't be read: No such file"),
        ("server.pem", b"nonsense", "must be a certificate and its key, in PEM"),
        ("ca.pem", b"nonsense", "must hold certificates, in PEM"),
    ],
)
async def test_files_that_are_no_certificates_are_one_clear_line(
    files: Certificates, what: str, content: bytes | None, message: str
) -> None:
    path = files.folder / what
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running_server(files.mutual_settings):
            pass
    (error,) = caught.value.exceptions
    assert isinstance(error, SettingsError)
    assert str(error).startswith("tls: ")
    assert message in str(error)
    assert "\n" not in str(error)


async def test_a_token_is_needed_and_health_needs_none() -> None:
    async with running_server(TENANTS) as app, grpc.aio.insecure_channel(app.address) as channel:
        for metadata in ((), bearer("wrong"), bearer(ACME) * 2, (("authorization", f"Basic {ACME}"),)):
            call = stub(channel).Generate(gen.GenerateRequest(spec=spec()), metadata=metadata)
            status = await refused(call)
            assert (status.code, reason_in(status)) == (16, "UNAUTHENTICATED")
            assert ACME not in status.message
        session = stub(channel).Session()  # what is written to a call that has been refused fails otherwise
        assert reason_in(await refused(session.read())) == "UNAUTHENTICATED"
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        assert len((await generate(channel, ACME)).token_ids) == 2
        assert app.metrics.refusals()["", "UNAUTHENTICATED"] == 5


async def test_a_token_is_never_logged(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**TENANTS, "log.level": "debug"}
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        await generate(channel, ACME)
        await refused(generate(channel, ACME + "x"))
    captured = capsys.readouterr()
    assert "request.ended" in captured.out + captured.err
    assert ACME not in captured.out + captured.err


async def test_the_cap_and_the_default_of_a_tenant_are_visible() -> None:
    async with running_server(TENANTS) as app, grpc.aio.insecure_channel(app.address) as channel:
        plain = (await generate(channel, ACME)).accepted
        assert (plain.level, plain.capped, plain.requested_level) == (5, False, 5)
        urgent = (await generate(channel, ACME, level=-10)).accepted
        assert (urgent.level, urgent.capped, urgent.requested_level) == (0, True, -10)
        ops = (await generate(channel, OPS, level=-10)).accepted
        assert (ops.level, ops.capped) == (-10, False)
        metadata = (*bearer(ACME), ("x-tenant", "ops"), ("tenant", "ops"), ("x-priority", "interactive"))
        call = stub(channel).Generate(gen.GenerateRequest(spec=spec()), metadata=metadata)
        forged = (await call).accepted
        assert (forged.level, forged.capped, forged.requested_level) == (0, True, -10)


async def test_a_reprioritisation_is_capped_too() -> None:
    runner = HeldRunner(64, 16)
    async with (
        running_server(TENANTS, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        method = channel.stream_stream(
            "/vorrang.v1.GenerationService/Session", None, gen.SessionResponse.FromString
        )
        async with open_session(_WithMetadata(channel, method, bearer(ACME))) as session:
            runner.hold()
            await session.start("a", spec([1], max_tokens=4))
            assert (await session.event("accepted")).level == 5
            await session.reprioritize("a", -50)
            await session.cancel("nobody")  # frames are obeyed in order: its answer says the other was read
            await session.event("command_rejected")
            runner.release()
            changed = await session.event("priority_changed")
            assert (changed.level, changed.capped) == (0, True)
            await session.end_of("a")


class _WithMetadata:
    """A channel whose sessions carry metadata."""

    def __init__(self, channel: Any, method: Any, metadata: Any) -> None:
        self._method, self._metadata = method, metadata

    def stream_stream(self, *_: Any) -> Any:
        return lambda metadata, timeout: self._method(metadata=self._metadata, timeout=timeout)


async def test_a_tenants_queue_and_seats_are_its_own() -> None:
    runner = HeldRunner(64, 16)
    settings = {**TENANTS, "tenants.acme.max_waiting_requests": 1, "tenants.acme.max_running_requests": 1}
    async with (
        running_server(settings, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        runner.hold()
        service = stub(channel)
        request = gen.GenerateRequest(spec=spec("hi", max_tokens=2))
        calls = [service.Generate(request, metadata=bearer(ACME))]
        await runner.held.wait()
        calls.append(service.Generate(request, metadata=bearer(ACME)))
        await settled(lambda: app.statistics().num_requests == 2)
        status = await refused(service.Generate(request, metadata=bearer(ACME)))
        assert reason_in(status) == "TENANT_QUOTA_EXCEEDED"
        calls.append(service.Generate(request, metadata=bearer(OPS)))
        await settled(lambda: app.statistics().num_requests == 3)
        listed = await control_pb2_grpc.ControlServiceStub(channel).ListRequests(
            control_pb2.ListRequestsRequest(), metadata=bearer(OPS)
        )
        assert sorted((r.tenant, r.level) for r in listed.requests) == [("acme", 5), ("acme", 5), ("ops", 0)]
        runner.release()
        for call in calls:
            assert len((await call).token_ids) == 2


async def test_tenants_share_no_prefix() -> None:
    async with running_server(TENANTS) as app, grpc.aio.insecure_channel(app.address) as channel:
        prompt = list(range(1, 60))
        request = gen.GenerateRequest(spec=spec(prompt, max_tokens=2))
        cached = [
            (await stub(channel).Generate(request, metadata=bearer(token))).finished.usage.cached_tokens
            for token in (ACME, OPS, ACME)
        ]
        assert cached[0] == cached[1] == 0 < cached[2]


async def test_a_tenant_is_held_to_its_tokens_a_second() -> None:
    settings = {**TENANTS, "tenants.acme.tokens_per_s": 0.5, "tenants.acme.burst_tokens": 3}
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        await generate(channel, ACME)  # a prompt of 2 and an output of 2
        status = await refused(generate(channel, ACME))
        assert reason_in(status) == "TENANT_QUOTA_EXCEEDED"
        assert "0.5 tokens a second" in status.message
        await generate(channel, OPS)


async def test_control_is_for_operators() -> None:
    async with running_server(TENANTS) as app, grpc.aio.insecure_channel(app.address) as channel:
        control = control_pb2_grpc.ControlServiceStub(channel)
        for method in control_pb2.DESCRIPTOR.services_by_name["ControlService"].methods:
            request = getattr(control_pb2, method.input_type.name)()
            call = getattr(control, method.name)(request, metadata=bearer(ACME))
            status = await refused(call.read() if method.server_streaming else call)
            assert (status.code, reason_in(status)) == (7, "PERMISSION_DENIED")
        await control.GetLoad(control_pb2.GetLoadRequest(), metadata=bearer(OPS))


async def services(address: str) -> set[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        answer = await call.read()
        call.cancel()
    return {entry.name.rpartition(".")[2] for entry in answer.list_services_response.service}


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_control_may_have_a_port_of_its_own() -> None:
    async with running_server({"control.listen": "127.0.0.1:0"}) as app:
        assert app.control_address not in ("", app.address)
        assert await services(app.address) == {"GenerationService", "Health", "ServerReflection"}
        assert await services(app.control_address) == {"ControlService", "Health", "ServerReflection"}
        async with grpc.aio.insecure_channel(app.address) as channel:
            control = control_pb2_grpc.ControlServiceStub(channel)
            code = await code_of(control.GetLoad(control_pb2.GetLoadRequest()))
            assert code is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.insecure_channel(app.control_address) as channel:
            control = control_pb2_grpc.ControlServiceStub(channel)
            assert (await control.GetLoad(control_pb2.GetLoadRequest())).num_blocks == 64
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
            code = await code_of(stub(channel).Generate(gen.GenerateRequest(spec=spec())))
            assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_control_and_reflection_can_be_switched_off() -> None:
    async with running_server({"control.enabled": False, "control.reflection": False}) as app:
        assert app.control_address == ""
        async with grpc.aio.insecure_channel(app.address) as channel:
            control = control_pb2_grpc.ControlServiceStub(channel)
            assert (
                await code_of(control.GetLoad(control_pb2.GetLoadRequest())) is grpc.StatusCode.UNIMPLEMENTED
            )
            listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            assert await code_of(listing.read()) is grpc.StatusCode.UNIMPLEMENTED
            assert await stub(channel).Tokenize(gen.TokenizeRequest(prompt=types.Prompt(text="x")))


async def test_probes_have_a_plaintext_port_that_says_nothing_but_health(files: Certificates) -> None:
    async with running_server({**files.settings, **TENANTS, "health.listen": "0.0.0.0:0"}) as app:
        address = app.health_address.replace("0.0.0.0", "127.0.0.1")
        async with grpc.aio.insecure_channel(address) as channel:
            assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
            code = await code_of(stub(channel).Generate(gen.GenerateRequest(spec=spec())))
            assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("setting", ["control.listen", "metrics.listen"])
async def test_other_ports_refuse_plaintext_off_loopback_as_well(setting: str) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running_server({setting: "0.0.0.0:0"}):
            pass
    (error,) = caught.value.exceptions
    assert str(error).startswith(f"{setting}: 0.0.0.0 is not loopback")
    assert "--insecure" in str(error)


@pytest.mark.slow
async def test_the_clients_command_line_brings_token_and_authority_from_the_environment(
    files: Certificates,
) -> None:
    async with running_server({**TENANTS, **files.settings}) as app:
        port = app.address.rpartition(":")[2]
        extra = {"VORRANG_CA": str(files.folder / "ca.pem"), "VORRANG_TOKEN": ACME}
        command = [sys.executable, "-m", "clients.python.cli", "generate", "hi", "--max-tokens", "4"]
        outcomes = []
        for more in (extra, {**extra, "VORRANG_TOKEN": "wrong"}, {"VORRANG_KEY": "nothing"}):
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment({**more, "VORRANG_TARGET": f"localhost:{port}"}),
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await process.communicate()
            outcomes.append((process.returncode, errors.decode()))
    assert outcomes[0][0] == 0, outcomes[0][1]
    assert "4 tokens" in outcomes[0][1]
    assert (outcomes[1][0], "not known" in outcomes[1][1]) == (1, True)
    assert outcomes[2] == (2, "vorrangctl: VORRANG_CERTIFICATE and VORRANG_KEY must be set together\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "code", "out", "error"),
    [
        (ACME + "\n", 0, hash_of(ACME) + "\n", ""),
        ("short", 2, "", "vorrangctl: a token must have at least 16 characters, this has 5\n"),
        ("with spaces in the middle", 2, "", "vorrangctl: a token must be printable ASCII without spaces\n"),
    ],
)
async def test_hash_token_reads_from_standard_input_and_prints_what_the_settings_take(
    token: str, code: int, out: str, error: str
) -> None:
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "clients.python.cli", "auth", "hash-token"],
        env=environment(),
        cwd=ROOT,
        input=token,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (code, out, error)
