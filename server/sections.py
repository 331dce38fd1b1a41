"""Sections of the settings; the scheduler's is made of its configuration in ``server.settings``."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from engine.priority import LEVEL_MAX, LEVEL_MIN
from engine.scheduler.config import TenantConfig

FROZEN = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)
ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[^:\[\]/]+):[0-9]{1,5}$"
TENANT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

TenantName = Annotated[str, StringConstraints(pattern=TENANT_NAME)]
#: Names of adapters; a dot would be a setting inside a setting.
AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
#: What ``vorrangctl auth hash-token`` prints.
TokenHash = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class ServerSection(BaseModel):
    """Where the server listens and what it takes.

    Attributes:
        listen: ``host:port``; port 0 = any free one.
        insecure: allow plaintext on more than loopback.
        event_loop: what runs the server: ``auto`` = uvloop where it is installed.
        grace_s: seconds running requests are given after SIGTERM.
        stall_s: seconds without an engine heartbeat before health says NOT_SERVING.
        default_level: priority of requests that carry none.
        default_max_tokens: output tokens of requests that don't say.
        max_session_requests: requests alive in one session.
        max_bad_frames: undecodable frames that end a session.
        max_frame_bytes: largest message taken.
        max_concurrent_streams: calls open on one connection.
    """

    model_config = FROZEN

    listen: str = Field(default="127.0.0.1:50051", pattern=ADDRESS)
    insecure: bool = False
    event_loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    grace_s: float = Field(default=30.0, ge=0, le=3600)
    stall_s: float = Field(default=30.0, gt=0)
    default_level: int = Field(default=0, ge=-100, le=100)
    default_max_tokens: int = Field(default=256, ge=1)
    max_session_requests: int = Field(default=256, ge=1)
    max_bad_frames: int = Field(default=16, ge=1)
    max_frame_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    max_concurrent_streams: int = Field(default=1000, ge=1)


class SessionSection(BaseModel):
    """What sessions may cost, and how long a lost one is kept.

    Attributes:
        credit_tokens: output tokens a request may produce before its client grants more, if its
            client says nothing of credit.
        slow_client_timeout_s: seconds a request waits for credit, or for its reader, before it fails.
        resume_grace_s: seconds for which the requests of a session that vanished go on; 0 = they
            are cancelled at once, and resuming is not offered.
        retention_s: seconds for which an ended request's events can be had again; 0 = not at all.
        max_replay_bytes: memory for the events of one request that were sent and may be asked for again.
        max_retained_requests: ended requests kept for ``retention_s``; the oldest are let go first.
        max_retained_bytes: memory for the events of those.
        queue_update_s: seconds between two updates of a request's place in the queue.
        reprioritize_per_s: changes of priority a second one request may get for long.
        reprioritize_burst: changes of priority one request may get at once.
        max_request_s: seconds after which any request ends with its output so far; None = never.
    """

    model_config = FROZEN

    credit_tokens: int = Field(default=4096, ge=1)
    slow_client_timeout_s: float = Field(default=30.0, gt=0)
    resume_grace_s: float = Field(default=10.0, ge=0, le=3600)
    retention_s: float = Field(default=60.0, ge=0, le=86400)
    max_replay_bytes: int = Field(default=256 * 1024, ge=0)
    max_retained_requests: int = Field(default=4096, ge=0)
    max_retained_bytes: int = Field(default=64 * 1024 * 1024, ge=0)
    queue_update_s: float = Field(default=0.5, gt=0)
    reprioritize_per_s: float = Field(default=5.0, gt=0)
    reprioritize_burst: int = Field(default=10, ge=1)
    max_request_s: float | None = Field(default=3600.0, gt=0)


class ModelSection(BaseModel):
    """Which model is served.

    Attributes:
        path: folder, GGUF file, or id on the hub (``owner/name``, ``owner/name/file.gguf``); None = the
            default model; ``scripted`` = a fake one for tests.
        revision: branch, tag or commit on the hub; None = its default.
        offline: serve a hub's model only as it was downloaded before.
        name: name under which it is served; None = its own.
        weights: how matrices are kept; ``auto`` = exactly, in the dtype of the checkpoint.
        special_tokens_in_chat: special tokens that are spelt in messages: ``text`` = they stay text,
            ``special`` = they are recognised, so that whoever writes a message can end its turn.
        adapters: folders of LoRA adapters in PEFT's format, by the name under which requests ask for them.
    """

    model_config = FROZEN

    path: str | None = None
    revision: str | None = Field(default=None, min_length=1)
    offline: bool = False
    name: str | None = Field(default=None, min_length=1, max_length=128)
    weights: Literal["auto", "fp32", "bf16", "fp16", "int8", "fp8"] = "auto"
    special_tokens_in_chat: Literal["text", "special"] = "text"
    adapters: dict[AdapterName, Path] = Field(default_factory=dict)


class KvSection(BaseModel):
    """Size of the KV pool.

    Attributes:
        num_blocks: blocks in the pool; None = from ``bytes`` or, without it, chosen by the runner.
        bytes: memory of the pool; with tensor parallelism, of each rank's part of it.
        block_size: tokens per block.
        device_share: of a card's memory that weights and the largest step leave, what the pool gets.
    """

    model_config = FROZEN

    num_blocks: int | None = Field(default=None, ge=1)
    bytes: int | None = Field(default=None, ge=1)
    block_size: int = Field(default=16, ge=1)
    device_share: float = Field(default=0.9, gt=0, lt=1)


class EngineSection(BaseModel):
    """How the engine computes.

    Attributes:
        runner: where the model computes: ``process`` (its own, which may die) or ``inline`` (a thread).
        runner_hang_s: seconds without a sign of life after which the runner's process counts as hanging.
        runner_step_s_max: seconds a step may take in it, whatever signs of life there are.
        runner_start_s_max: seconds loading may take in it.
        runner_max_restarts: restarts in a row, without a step between them, after which the server ends.
        pipeline_depth: steps that are planned ahead of the one being computed: 0, or 1, which hides the
            time that planning and delivery take, and lets commands take effect one step later.
        threads: threads a step may use; None = one per physical core that it may use.
        kernels: implementation of the operations; ``auto`` = the quickest that can be had here.
        batch_invariant: a row's bits must not depend on its neighbours; costs speed, on a card alone.
        device: where they compute; ``auto`` = a card, where there is one and the kernels can use it.
        tensor_parallel: processes, and cards, that one model is cut over.
        grammar_compile_s_max: seconds of a processor a grammar may take to compile before its request fails.
        grammar_mask_s_max: seconds of a processor that finding out what may come next may take in all, for
            one output; then its request fails.
        grammar_wait_s_max: seconds a request may wait for its grammar to be compiled, its turn included.
        max_buffered_tokens: output tokens held for a client that does not read.
        scripted_step_s: seconds one step of the scripted model takes.
        record_decisions: file that gets the decision log, prompts' token ids included; None = no log.
        record_decisions_max_bytes: size at which the log ends.
    """

    model_config = FROZEN

    runner: Literal["process", "inline"] = "process"
    runner_hang_s: float = Field(default=5.0, ge=0.1)
    runner_step_s_max: float = Field(default=120.0, gt=0)
    runner_start_s_max: float = Field(default=600.0, gt=0)
    runner_max_restarts: int = Field(default=8, ge=0)
    pipeline_depth: int = Field(default=0, ge=0, le=1)
    threads: int | None = Field(default=None, ge=1)
    kernels: Literal["auto", "triton", "cpu", "reference"] = "auto"
    batch_invariant: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    grammar_compile_s_max: float = Field(default=10.0, gt=0)
    grammar_mask_s_max: float = Field(default=10.0, gt=0)
    grammar_wait_s_max: float = Field(default=60.0, gt=0)
    max_buffered_tokens: int = Field(default=8192, ge=1)
    scripted_step_s: float = Field(default=0.0, ge=0)
    record_decisions: Path | None = None
    record_decisions_max_bytes: int = Field(default=1024**3, ge=4096)


class LogSection(BaseModel):
    """What is logged, and how: to stderr."""

    model_config = FROZEN

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


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

    token_hashes: tuple[TokenHash, ...] = Field(default=(), repr=False)
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

    otlp_endpoint: str | None = Field(default=None, min_length=1, repr=False)
    sample_share: float = Field(default=1.0, ge=0, le=1)
