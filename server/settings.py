"""Settings of the server: TOML file < environment ``VORRANG_KV__NUM_BLOCKS`` < command line.

Unknown keys fail, and every value knows where it came from.
"""

import dataclasses
import functools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from engine.errors import VorrangError
from engine.priority import CLASSES
from engine.scheduler.config import ClassConfig, SchedulerConfig
from engine.scheduler.order import policy_named
from server.sections import (
    ADDRESS,
    AdapterName,
    AdmissionSection,
    ControlSection,
    HealthSection,
    MetricsSection,
    TenantName,
    TenantSection,
    TlsSection,
    TracingSection,
)
from server.sections import FROZEN as _FROZEN

PREFIX = "VORRANG_"
DELIMITER = "__"
#: In the place of a model's path: the hand-computable fake that tests are made with.
SCRIPTED = "scripted"


class SettingsError(VorrangError):
    """Settings that can't be used; the message names setting, rule, value and origin."""


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

    model_config = _FROZEN

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

    model_config = _FROZEN

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
        adapters: folders of LoRA adapters in PEFT's format, by the name under which requests ask for them.
    """

    model_config = _FROZEN

    path: str | None = None
    revision: str | None = Field(default=None, min_length=1)
    offline: bool = False
    name: str | None = Field(default=None, min_length=1, max_length=128)
    weights: Literal["auto", "fp32", "bf16", "fp16", "int8", "fp8"] = "auto"
    adapters: dict[AdapterName, Path] = Field(default_factory=dict)


class KvSection(BaseModel):
    """Size of the KV pool.

    Attributes:
        num_blocks: blocks in the pool; None = from ``bytes`` or, without it, chosen by the runner.
        bytes: memory of the pool; with tensor parallelism, of each rank's part of it.
        block_size: tokens per block.
        device_share: of a card's memory that weights and the largest step leave, what the pool gets.
    """

    model_config = _FROZEN

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
        threads: threads a step may use; None = one per physical core.
        kernels: implementation of the operations; ``auto`` = the quickest that can be had here.
        batch_invariant: a row's bits must not depend on its neighbours; costs speed, on a card alone.
        device: where they compute; ``auto`` = a card, where there is one and the kernels can use it.
        tensor_parallel: processes, and cards, that one model is cut over.
        grammar_compile_s_max: seconds a grammar may take to compile before its request fails.
        max_buffered_tokens: output tokens held for a client that does not read.
        scripted_step_s: seconds one step of the scripted model takes.
        record_decisions: file that gets the decision log, prompts' token ids included; None = no log.
        record_decisions_max_bytes: size at which the log ends.
    """

    model_config = _FROZEN

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
    max_buffered_tokens: int = Field(default=8192, ge=1)
    scripted_step_s: float = Field(default=0.0, ge=0)
    record_decisions: Path | None = None
    record_decisions_max_bytes: int = Field(default=1024**3, ge=4096)


class LogSection(BaseModel):
    """What is logged, and how: to stderr."""

    model_config = _FROZEN

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


_CLASS_NAMES = [priority_class.name for priority_class in CLASSES]


def _complete_class(value: Any, info: ValidationInfo) -> Any:
    """Settings of a class that are not given keep that class's own defaults."""
    default: ClassConfig = getattr(SchedulerConfig(), info.field_name or "")
    return dataclasses.asdict(default) | value if isinstance(value, dict) else value


#: The fields of ``SchedulerConfig``, so that they are written down once; tenants have a section of their own.
SchedulerSection: Any = create_model(
    "SchedulerSection",
    __config__=_FROZEN,
    __validators__={"complete": field_validator(*_CLASS_NAMES, mode="before")(_complete_class)},
    **{  # type: ignore[call-overload]
        field.name: (field.type, field.default)
        for field in dataclasses.fields(SchedulerConfig)
        if field.name != "tenants"
    },
)


class Settings(BaseSettings):
    """All settings. ``load`` fills them from every source; made directly, they take arguments alone."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter=DELIMITER,
        extra="forbid",
        frozen=True,
        validate_default=True,
    )

    server: ServerSection = ServerSection()
    session: SessionSection = SessionSection()
    model: ModelSection = ModelSection()
    kv: KvSection = KvSection()
    scheduler: SchedulerSection = SchedulerSection()
    engine: EngineSection = EngineSection()
    log: LogSection = LogSection()
    tls: TlsSection = TlsSection()
    tenants: dict[TenantName, TenantSection] = Field(default_factory=dict)
    admission: AdmissionSection = AdmissionSection()
    control: ControlSection = ControlSection()
    health: HealthSection = HealthSection()
    metrics: MetricsSection = MetricsSection()
    tracing: TracingSection = TracingSection()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments alone."""
        return (init_settings,)

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """What the engine's scheduler is told.

        Raises:
            InvalidSetting: the values contradict each other.
        """
        names = [field.name for field in dataclasses.fields(SchedulerConfig) if field.name != "tenants"]
        tenants = tuple(tenant.rules(name) for name, tenant in self.tenants.items())
        return SchedulerConfig(**{name: getattr(self.scheduler, name) for name in names}, tenants=tenants)


@dataclass(frozen=True, slots=True)
class Described:
    """One setting: its path, its value, and ``default``, ``file``, ``env`` or ``cli``."""

    path: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and where each came from."""

    settings: Settings
    origins: Mapping[str, str]

    def describe(self) -> list[Described]:
        """Every effective value and its origin."""
        values = _flat(self.settings.model_dump())
        return [Described(path, value, self.origins.get(path, "default")) for path, value in values.items()]


def load(config: Path | None = None, cli: Mapping[str, object] | None = None) -> Loaded:
    """Read and validate all sources.

    Args:
        config: TOML file; None = none.
        cli: values from the command line by path, such as ``kv.num_blocks``; None values are left out.

    Raises:
        SettingsError: a source can't be read, a key is unknown or a value breaks a rule.
    """
    origins: dict[str, str] = {}

    class FromAllSources(Settings):
        """Settings that note where each value comes from."""

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            sources = {
                "file": TomlConfigSettingsSource(settings_cls, config),
                "env": env_settings,
                "cli": init_settings,
            }
            for origin, source in sources.items():
                origins.update(dict.fromkeys(_flat(source()), origin))
            return tuple(reversed(sources.values()))

    if config is not None and not config.is_file():
        raise SettingsError(f"the config file {config} can't be read: no such file")
    _refuse_unknown_sections()
    try:
        settings = FromAllSources(**_nested(cli or {}))
        policy_named(settings.scheduler_config.policy)
    except ValidationError as error:
        raise SettingsError(_explain(error, origins)) from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"the config file {config} can't be read: {error}") from None
    except VorrangError as error:
        raise SettingsError(str(error)) from None
    if settings.kv.num_blocks is not None and settings.kv.bytes is not None:
        raise SettingsError("kv.bytes must not be set together with kv.num_blocks")
    _check_tenants(settings.tenants)
    _refuse_ranks_without_processes(settings)
    if settings.engine.pipeline_depth and settings.scheduler.speculation_tokens:
        rule = "must be 0 with scheduler.speculation_tokens: how far guesses get is not known ahead"
        raise SettingsError(f"engine.pipeline_depth {rule}, got {settings.engine.pipeline_depth}")
    return Loaded(settings, origins)


def _refuse_ranks_without_processes(settings: Settings) -> None:
    """Ranks are processes, of a real model, and so is the one that leads them."""
    size = settings.engine.tensor_parallel
    for setting, value in (("engine.runner", "inline"), ("model.path", SCRIPTED)):
        section, name = setting.split(".")
        if size > 1 and getattr(getattr(settings, section), name) == value:
            raise SettingsError(f"engine.tensor_parallel must be 1 with {setting} {value}, got {size}")


def _check_tenants(tenants: Mapping[str, TenantSection]) -> None:
    """A credential names one tenant.

    Raises:
        SettingsError: it names two, or callers without one would be two.
    """
    for what in ("token_hashes", "certificate_subjects"):
        owners: dict[str, str] = {}
        for name, tenant in tenants.items():
            for credential in getattr(tenant, what):
                if credential in owners:
                    other = owners[credential]
                    raise SettingsError(f"tenants.{name}.{what} holds what tenants.{other}.{what} holds")
                owners[credential] = name
    anonymous = [name for name, tenant in tenants.items() if tenant.anonymous]
    if len(anonymous) > 1:
        raise SettingsError(f"tenants.{anonymous[1]}.anonymous: tenants.{anonymous[0]} has it already")


def _refuse_unknown_sections() -> None:
    """The environment source passes over variables of sections it does not know."""
    for variable in os.environ:
        section, delimiter, _ = variable.removeprefix(PREFIX).partition(DELIMITER)
        if variable.startswith(PREFIX) and delimiter and section.lower() not in Settings.model_fields:
            raise SettingsError(f"{section.lower()} is no setting (from env, {variable})")


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    """``{"kv.num_blocks": 1}`` as ``{"kv": {"num_blocks": 1}}``; None values are left out."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        if value is not None:
            *sections, name = path.split(".")
            functools.reduce(lambda node, key: node.setdefault(key, {}), sections, tree)[name] = value
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """The reverse of ``_nested``."""
    flat: dict[str, object] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            origin = next((o for p, o in origins.items() if p == path or p.startswith(f"{path}.")), "?")
            lines.append(f"{path} is no setting (from {origin})")
        else:
            rule = problem["msg"][0].lower() + problem["msg"][1:]
            lines.append(f"{path}: {rule}, got {problem['input']!r} (from {origins.get(path, 'default')})")
    return "; ".join(lines)
