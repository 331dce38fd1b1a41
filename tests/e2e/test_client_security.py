"""The Python client with TLS, certificates, tokens and limits, against a real server."""

import asyncio
from pathlib import Path

import pytest

from clients.python import AccessDenied, ConnectionLost, SyncClient, VorrangClient
from clients.python.auth import hash_token
from engine.runner.scripted import expected_output
from tests.support import canaries
from tests.support.certificates import Certificates, certificates
from tests.support.cutting_proxy import CuttingProxy
from tests.support.server import running_server
from tests.support.wire import settled

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

TOKEN = canaries.TOKEN
TENANTS: dict[str, object] = {
    "tenants.acme.token_hashes": [hash_token(TOKEN)],
    "tenants.acme.most_urgent_level": 0,
    "tenants.robots.certificate_subjects": ["CN=robot"],
    "tenants.robots.most_urgent_level": 3,
}


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return certificates(tmp_path)


def write_client(files: Certificates, common_name: str) -> None:
    """Put a client's certificate beside the server's."""
    own = files.ca.issue_cert("client@example.org", common_name=common_name)
    own.private_key_pem.write_to_path(files.folder / "client.key")
    (files.folder / "client.pem").write_bytes(b"".join(part.bytes() for part in own.cert_chain_pems))


async def test_a_session_keeps_its_identity_over_a_new_connection(
    files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VORRANG_CA", str(files.folder / "ca.pem"))
    monkeypatch.setenv("VORRANG_TOKEN", TOKEN)
    settings = {**TENANTS, **files.settings, "engine.scripted_step_s": 0.002}
    async with running_server(settings) as app, CuttingProxy(app.address) as proxy:
        port = proxy.address.rpartition(":")[2]
        async with (
            VorrangClient.from_environment(f"localhost:{port}") as client,
            client.session() as session,
        ):
            stream = await session.start(
                token_ids=[1], temperature=0.0, max_tokens=100, priority="interactive", credit_tokens=8
            )
            for _ in range(3):
                await anext(stream)
            proxy.cut()
            changed = await stream.reprioritize(-50)
            assert (changed.level, changed.capped) == (0, True)
            result = await stream.result()
            assert result.accepted is not None
            assert (result.accepted.level, result.accepted.capped) == (0, True)
            assert result.accepted.requested_level == -10
            assert list(result.token_ids) == expected_output([1], 100)
    assert proxy.num_connections == 2


async def test_a_certificate_says_who_calls_in_both_clients(
    files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_client(files, "robot")
    for name, file in (("CA", "ca.pem"), ("CERTIFICATE", "client.pem"), ("KEY", "client.key")):
        monkeypatch.setenv(f"VORRANG_{name}", str(files.folder / file))
    async with running_server({**TENANTS, **files.mutual_settings}) as app:
        target = f"localhost:{app.address.rpartition(':')[2]}"
        async with VorrangClient.from_environment(target) as client:
            accepted = (await client.generate("x", max_tokens=2, priority=-20)).accepted
            assert accepted is not None
            assert (accepted.level, accepted.capped) == (3, True)
        async with VorrangClient(target, credentials=files.client()) as client:
            with pytest.raises(ConnectionLost):
                await client.generate("x", timeout_s=20)
        async with VorrangClient(target, credentials=files.client("stranger")) as client:
            with pytest.raises(AccessDenied) as caught:
                async with client.session():
                    pytest.fail("the session must not open")
            assert caught.value.reason == "UNAUTHENTICATED"


async def test_a_bad_token_is_refused_before_anything_is_done() -> None:
    async with running_server(TENANTS) as app:
        metadata = [("authorization", "Bearer of-bad-news-0123456789")]
        async with VorrangClient(app.address, metadata=metadata) as client:
            with pytest.raises(AccessDenied):
                await client.generate("x")
            with pytest.raises(AccessDenied):
                await client.generate_stream("x").result()
            with pytest.raises(AccessDenied):
                async with client.session():
                    pytest.fail("the session must not open")


async def test_half_a_pair_of_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VORRANG_KEY", "x")
    with pytest.raises(ValueError, match="VORRANG_KEY must be set together"):
        SyncClient.from_environment("x")


async def test_calls_beyond_what_a_connection_takes_are_tried_again() -> None:
    settings = {"server.max_concurrent_streams": 4, "engine.scripted_step_s": 0.001}
    async with running_server(settings) as app, VorrangClient(app.address) as client:
        # So few that all attempts of all of them do not use up what the client may retry in all.
        calls = [client.generate(token_ids=[n + 1], temperature=0.0, max_tokens=4) for n in range(16)]
        for n, result in enumerate(await asyncio.gather(*calls)):
            assert list(result.token_ids) == expected_output([n + 1], 4)
        await settled(lambda: app.backend.engine.statistics().num_alive == 0)
