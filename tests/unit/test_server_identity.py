"""Who calls, by token or certificate; how many calls may be open; tokens a second."""

from typing import Any

import pytest

from clients.python.auth import hash_token
from server.door import MAX_PEERS, Door, host_of
from server.errors import TokenRateExceeded, TooManyCalls, Unauthenticated
from server.identity import EVERYBODY, Authenticator, hash_of
from server.sections import AdmissionSection, TenantSection
from server.settings import SettingsError, load
from server.token_rates import TokenRates
from tests.support import canaries

TOKEN = canaries.TOKEN
TENANTS = {
    "acme": TenantSection(token_hashes=(hash_of(TOKEN), hash_of("its-second-token-is-long-too"))),
    "ops": TenantSection(certificate_subjects=("CN=admin",), operator=True),
    "full": TenantSection(certificate_subjects=("CN=robot,O=Full",)),
}


def identify(authenticator: Authenticator, *values: str, **auth: list[bytes]) -> str:
    metadata = [("x-other", "y"), *(("authorization", value) for value in values)]
    return authenticator.identify(metadata, lambda: auth).tenant


def certificate(subject: bytes, common_name: bytes) -> dict[str, Any]:
    return {
        "transport_security_type": [b"ssl"],
        "x509_subject": [subject],
        "x509_common_name": [common_name],
    }


def test_a_token_names_its_tenant() -> None:
    authenticator = Authenticator(TENANTS)
    assert identify(authenticator, f"Bearer {TOKEN}") == "acme"
    assert identify(authenticator, "bearer its-second-token-is-long-too") == "acme"
    assert identify(authenticator, f"BEARER {TOKEN}") == identify(authenticator, f"bEaReR {TOKEN}") == "acme"


@pytest.mark.parametrize(
    "values",
    [(), ("",), (TOKEN,), (f"Basic {TOKEN}",), (f"Bearer {TOKEN}x",), ("Bearer ",), (f"Bearer {TOKEN}",) * 2],
)
def test_anything_else_is_nobody_and_no_message_holds_it(values: tuple[str, ...]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        identify(Authenticator(TENANTS), *values)
    assert TOKEN not in str(caught.value)


def test_a_certificate_names_its_tenant_by_common_name_or_by_all_of_its_subject() -> None:
    authenticator = Authenticator(TENANTS)
    assert identify(authenticator, **certificate(b"CN=admin,O=Any", b"admin")) == "ops"
    assert identify(authenticator, **certificate(b"CN=robot,O=Full", b"robot")) == "full"
    for other in (certificate(b"CN=robot,O=Other", b"robot"), certificate(b"CN=x", b"x")):
        with pytest.raises(Unauthenticated):
            identify(authenticator, **other)


def test_a_subject_that_tls_did_not_check_is_nobody() -> None:
    forged = certificate(b"CN=admin", b"admin") | {"transport_security_type": [b"insecure"]}
    with pytest.raises(Unauthenticated):
        identify(Authenticator(TENANTS), **forged)


def test_a_bad_token_is_not_passed_over_for_a_good_certificate() -> None:
    with pytest.raises(Unauthenticated):
        identify(Authenticator(TENANTS), "Bearer wrong", **certificate(b"CN=admin", b"admin"))


def test_where_nobody_has_credentials_everybody_is_an_operator() -> None:
    assert Authenticator({}).identify([], dict) is EVERYBODY
    assert EVERYBODY.operator
    limited = Authenticator({"all": TenantSection(anonymous=True, most_urgent_level=0)})
    caller = limited.identify([], dict)
    assert (caller.tenant, caller.operator, caller.allowed(-10), caller.allowed(5)) == ("all", False, 0, 5)


def test_callers_without_a_credential_may_have_a_tenant_of_their_own() -> None:
    authenticator = Authenticator({**TENANTS, "guest": TenantSection(anonymous=True)})
    assert identify(authenticator) == "guest"
    with pytest.raises(Unauthenticated):
        identify(authenticator, "Bearer wrong")


def test_client_and_server_hash_alike() -> None:
    assert hash_token(TOKEN) == hash_of(TOKEN)


@pytest.mark.parametrize(
    ("cli", "message"),
    [
        ({"tenants.a.token_hashes": [TOKEN]}, "tenants.a.token_hashes.0: string should match pattern"),
        ({"tenants.a b.weight": 1}, "string should match pattern"),
        ({"tenants.a.most_urgent_level": 0, "tenants.a.default_level": -1}, "must not be more urgent"),
        ({"tenants.a.burst_tokens": 5}, "must not be set without tokens_per_s"),
        ({"tenants.a.anonymous": True, "tenants.b.anonymous": True}, "tenants.a has it already"),
        (
            {"tenants.a.token_hashes": [hash_of("x")], "tenants.b.token_hashes": [hash_of("x")]},
            "tenants.b.token_hashes holds what tenants.a.token_hashes holds",
        ),
        ({"tls.certificate": "a.pem"}, "certificate and private_key must be set together"),
        ({"tls.client_ca": "a.pem"}, "client_ca must not be set without a certificate"),
    ],
)
def test_bad_tenants_and_certificates_are_refused_at_the_start(cli: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(None, cli)
    assert message in str(caught.value)


def test_what_the_scheduler_is_told_of_tenants() -> None:
    cli = {"tenants.a.weight": 2.0, "tenants.a.max_running_requests": 3, "tenants.a.max_waiting_tokens": 5}
    (tenant,) = load(None, cli).settings.scheduler_config.tenants
    assert (tenant.name, tenant.weight, tenant.max_running_requests) == ("a", 2.0, 3)
    assert (tenant.max_waiting_tokens, tenant.max_running_tokens) == (5, None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def door(clock: Clock, **limits: Any) -> Door:
    return Door(AdmissionSection(**limits), clock)


def test_open_calls_are_counted_in_all_by_peer_and_by_kind() -> None:
    at = door(Clock(), max_calls=3, max_peer_calls=2, max_sessions=1)
    at.enter("ipv4:1.1.1.1:10", is_session=True)
    at.enter("ipv4:1.1.1.1:11", is_session=False)
    with pytest.raises(TooManyCalls, match="open calls of this peer"):
        at.enter("ipv4:1.1.1.1:12", is_session=False)
    with pytest.raises(TooManyCalls, match="open sessions"):
        at.enter("ipv4:2.2.2.2:1", is_session=True)
    at.enter("ipv4:2.2.2.2:1", is_session=False)
    with pytest.raises(TooManyCalls, match="open calls: "):
        at.enter("ipv4:3.3.3.3:1", is_session=False)
    at.leave("ipv4:1.1.1.1:10", is_session=True)
    at.enter("ipv4:3.3.3.3:1", is_session=True)


def test_starts_are_counted_by_peer_and_come_back_with_time() -> None:
    clock = Clock()
    at = door(clock, max_peer_starts_per_s=2.0, peer_start_burst=3)
    for _ in range(3):
        at.enter("ipv4:1.1.1.1:1", is_session=False)
        at.leave("ipv4:1.1.1.1:1", is_session=False)
    with pytest.raises(TooManyCalls, match="2 a second") as caught:
        at.enter("ipv4:1.1.1.1:2", is_session=False)
    assert caught.value.retry_after_s == 0.5
    at.enter("ipv4:2.2.2.2:1", is_session=False)
    clock.now += 0.5
    at.enter("ipv4:1.1.1.1:2", is_session=False)


def test_what_is_remembered_of_peers_does_not_grow() -> None:
    at = door(Clock())
    at.enter("ipv4:9.9.9.9:1", is_session=False)
    for number in range(MAX_PEERS + 10):
        peer = f"ipv6:[::{number:x}]:1"
        at.enter(peer, is_session=False)
        at.leave(peer, is_session=False)
    assert at.num_peers == MAX_PEERS
    at.leave("ipv4:9.9.9.9:1", is_session=False)


def test_a_peer_is_its_address_without_the_port() -> None:
    assert host_of("ipv4:127.0.0.1:42") == "ipv4:127.0.0.1"
    assert host_of("ipv6:%5B::1%5D:42") == "ipv6:%5B::1%5D"
    assert host_of("unix:/run/a:b") == "unix:/run/a:b"


def test_a_tenant_in_debt_waits_until_it_is_paid() -> None:
    clock = Clock()
    rates = TokenRates({"a": TenantSection(tokens_per_s=10.0, burst_tokens=20)}, clock)
    rates.check("a")
    rates.spend("a", 45)
    with pytest.raises(TokenRateExceeded) as caught:
        rates.check("a")
    assert caught.value.retry_after_s == 2.5
    clock.now += 2.6
    rates.check("a")
    clock.now += 1000
    rates.check("a")
    rates.spend("a", 20)  # no more than the burst was saved
    with pytest.raises(TokenRateExceeded):
        rates.check("a")
    rates.check("b")
    rates.spend("b", 10**9)
    rates.check("b")
