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
from typing import Any

from pydantic import (
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
from pydantic_settings.exceptions import SettingsError as UnreadableSource

from engine.errors import VorrangError
from engine.priority import CLASSES
from engine.scheduler.config import ClassConfig, SchedulerConfig
from engine.scheduler.policies import policy_named
from server.sections import (
    FROZEN,
    AdmissionSection,
    ControlSection,
    EngineSection,
    HealthSection,
    KvSection,
    LogSection,
    MetricsSection,
    ModelSection,
    ServerSection,
    SessionSection,
    TenantName,
    TenantSection,
    TlsSection,
    TracingSection,
)
from timeline.secrecy import redacted, shown_setting

PREFIX = "VORRANG_"
DELIMITER = "__"
#: In the place of a model's path: the hand-computable fake that tests are made with.
SCRIPTED = "scripted"


class SettingsError(VorrangError):
    """Settings that can't be used; the message names setting, rule, value and origin."""


_CLASS_NAMES = [priority_class.name for priority_class in CLASSES]


def _complete_class(value: Any, info: ValidationInfo) -> Any:
    """Settings of a class that are not given keep that class's own defaults."""
    default: ClassConfig = getattr(SchedulerConfig(), info.field_name or "")
    return dataclasses.asdict(default) | value if isinstance(value, dict) else value


#: The fields of ``SchedulerConfig``, so that they are written down once; tenants have a section of their own.
SchedulerSection: Any = create_model(
    "SchedulerSection",
    __config__=FROZEN,
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
        hide_input_in_errors=True,
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
        """Every effective value, as it may be shown, and its origin."""
        values = _flat(self.settings.model_dump())
        return [
            Described(path, shown_setting(path, value), self.origins.get(path, "default"))
            for path, value in values.items()
        ]


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
    except UnreadableSource as error:  # it names the setting, and not what it holds
        raise SettingsError(redacted(str(error))) from None
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
            got = shown_setting(path, problem["input"])
            lines.append(f"{path}: {redacted(rule)}, got {got!r} (from {origins.get(path, 'default')})")
    return "; ".join(lines)
