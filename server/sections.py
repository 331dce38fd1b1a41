"""The operator's sections of the settings: TLS, tenants, admission, control, health, metrics, tracing."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from engine.priority import LEVEL_MAX, LEVEL_MIN
from engine.scheduler.config import TenantConfig

FROZEN = ConfigDict(extra="forbid", frozen=True, validate_default=True)
ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[^:\[\]/]+):[0-9]{1,5}$"
TENANT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

TenantName = Annotated[str, StringConstraints(pattern=TENANT_NAME)]
#: Names of adapters; a dot would be a setting inside a setting.
AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
#: What ``vorrangctl auth hash-token`` prints.
TokenHash = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class TlsSection(BaseModel):
    """Transport security of the gRPC ports; files are PEM and are read again when they change.

    Attributes:
        certificate: the server's certificate, with the chain that leads to its authority; None = plaintext.
        private_key: its key.
        client_ca: authorities of client certificates; set = every client must show one (mTLS).
    """

    model_config = FROZEN

    certificate: Path | None = None
    private_key: Path | None = None
    client_ca: Path | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key must be set together")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca must not be set without a certificate")
        return self


class TenantSection(BaseModel):
    """Who a tenant is and what it may do. As soon as any tenant has a credential, every caller needs one.

    Attributes:
        token_hashes: hashes of its bearer tokens, from ``vorrangctl auth hash-token``.
        certificate_subjects: subjects of its client certificates, as ``CN=name`` or all of it.
        anonymous: callers without a credential are this tenant.
        operator: may call ControlService.
        most_urgent_level: requests that ask for more get this, visibly.
        default_level: priority of requests that carry none; None = the server's.
        max_running_requests: seats it may hold.
        max_running_tokens: prompt + output tokens, at their longest, of what it has in seats.
        max_waiting_requests: its longest queue.
        max_waiting_tokens: most prompt tokens in that queue.
        tokens_per_s: prompt and output tokens a second, on average; None = no limit.
        burst_tokens: tokens it may be ahead of that average; None = ten seconds' worth.
        weight: its share relative to others under the policy ``fair``.
    """

    model_config = FROZEN

    token_hashes: tuple[TokenHash, ...] = ()
    certificate_subjects: tuple[str, ...] = ()
    anonymous: bool = False
    operator: bool = False
    most_urgent_level: int = Field(default=LEVEL_MIN, ge=LEVEL_MIN, le=LEVEL_MAX)
    default_level: int | None = Field(default=None, ge=LEVEL_MIN, le=LEVEL_MAX)
    max_running_requests: int | None = Field(default=None, ge=1)
    max_running_tokens: int | None = Field(default=None, ge=1)
    max_waiting_requests: int | None = Field(default=None, ge=1)
    max_waiting_tokens: int | None = Field(default=None, ge=1)
    tokens_per_s: float | None = Field(default=None, gt=0)
    burst_tokens: int | None = Field(default=None, ge=1)
    weight: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.default_level is not None and self.default_level < self.most_urgent_level:
            raise ValueError("default_level must not be more urgent than most_urgent_level")
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ValueError("burst_tokens must not be set without tokens_per_s")
        return self

    @property
    def has_credentials(self) -> bool:
        """Whether anybody can prove to be this tenant."""
        return bool(self.token_hashes or self.certificate_subjects)

    def rules(self, name: str) -> TenantConfig:
        """What the scheduler is told of it."""
        return TenantConfig(
            name,
            self.max_running_requests,
            self.max_running_tokens,
            self.max_waiting_requests,
            self.max_waiting_tokens,
            self.weight,
        )


class AdmissionSection(BaseModel):
    """What is let in before a request is looked at. A peer is an IP address, or a Unix socket.

    Attributes:
        max_calls: calls open at once, sessions included.
        max_sessions: sessions open at once.
        max_peer_calls: calls one peer may have open at once.
        max_peer_starts_per_s: calls a peer may begin in a second, on average.
        peer_start_burst: calls it may be ahead of that average.
        max_connections: connections open at once on one port.
        max_metadata_bytes: metadata of one call.
        handshake_timeout_s: seconds in which a connection must be made.
        keepalive_s: silence after which a connection is probed.
        keepalive_timeout_s: seconds in which the probe must be answered.
        min_ping_interval_s: a client that probes more often is sent away.
    """

    model_config = FROZEN

    max_calls: int = Field(default=4096, ge=1)
    max_sessions: int = Field(default=1024, ge=1)
    max_peer_calls: int = Field(default=1024, ge=1)
    max_peer_starts_per_s: float = Field(default=1000.0, gt=0)
    peer_start_burst: int = Field(default=4000, ge=1)
    max_connections: int = Field(default=4096, ge=1)
    max_metadata_bytes: int = Field(default=16 * 1024, ge=1024)
    handshake_timeout_s: float = Field(default=10.0, gt=0)
    keepalive_s: float = Field(default=30.0, ge=1)
    keepalive_timeout_s: float = Field(default=10.0, gt=0)
    min_ping_interval_s: float = Field(default=10.0, gt=0)


class ControlSection(BaseModel):
    """The operators' service.

    Attributes:
        enabled: whether there is one.
        listen: ``host:port`` of its own; None = the server's.
        reflection: whether the ports describe their services.
        past_steps: steps kept for ``WatchDecisions``; 0 = none.
        past_requests: ended requests kept for ``ExplainRequest``; 0 = none, those that are alive aside.
        max_watchers: calls of ``WatchDecisions`` open at once.
        max_watcher_steps: steps kept for a watcher that does not read; older ones are lost to it.
    """

    model_config = FROZEN

    enabled: bool = True
    listen: str | None = Field(default=None, pattern=ADDRESS)
    reflection: bool = True
    past_steps: int = Field(default=64, ge=0, le=100_000)
    past_requests: int = Field(default=1024, ge=0, le=100_000)
    max_watchers: int = Field(default=8, ge=1)
    max_watcher_steps: int = Field(default=256, ge=1)


class HealthSection(BaseModel):
    """A port for probes that cannot speak TLS, as those of the kubelet; it says nothing but health.

    Attributes:
        listen: ``host:port``, always plaintext; None = health is on the other gRPC ports alone.
    """

    model_config = FROZEN

    listen: str | None = Field(default=None, pattern=ADDRESS)


class MetricsSection(BaseModel):
    """Metrics for Prometheus, over plain HTTP.

    Attributes:
        listen: ``host:port``; None = no metrics.
    """

    model_config = FROZEN

    listen: str | None = Field(default=None, pattern=ADDRESS)


class TracingSection(BaseModel):
    """A span per request, sent by OTLP over gRPC; needs the extra ``otel``.

    Attributes:
        otlp_endpoint: such as ``http://127.0.0.1:4317``; None = no spans.
        sample_share: share of the requests that get one.
    """

    model_config = FROZEN

    otlp_endpoint: str | None = Field(default=None, min_length=1)
    sample_share: float = Field(default=1.0, ge=0, le=1)
