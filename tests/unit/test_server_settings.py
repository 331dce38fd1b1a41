"""Settings: order of sources, unknown keys, origins, messages."""

import inspect
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.models import registry
from engine.scheduler.config import SchedulerConfig
from server.identity import hash_of
from server.load import _arguments as model_arguments
from server.sections import TenantSection
from server.settings import SettingsError, load
from tests.support import canaries
from timeline.secrecy import HIDDEN


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("VORRANG_")]:
        monkeypatch.delenv(variable)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "vorrang.toml"
    path.write_text(text)
    return path


def test_file_is_overruled_by_environment_and_that_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "[kv]\nnum_blocks = 1\nblock_size = 2\n[scheduler.batch]\nwatermark = 0.5\n")
    monkeypatch.setenv("VORRANG_KV__NUM_BLOCKS", "3")
    monkeypatch.setenv("VORRANG_SCHEDULER__BATCH__WATERMARK", "0.25")
    loaded = load(file, {"kv.num_blocks": 4, "engine.threads": None})
    settings = loaded.settings
    assert (settings.kv.num_blocks, settings.kv.block_size) == (4, 2)
    assert settings.scheduler_config.batch.watermark == 0.25
    assert settings.scheduler_config.batch.max_wait_s == SchedulerConfig().batch.max_wait_s
    origins = {entry.path: entry.origin for entry in loaded.describe()}
    assert origins["kv.num_blocks"] == "cli"
    assert origins["kv.block_size"] == "file"
    assert origins["scheduler.batch.watermark"] == "env"
    assert origins["engine.threads"] == "default"


def test_defaults_are_those_of_the_scheduler() -> None:
    assert load().settings.scheduler_config == SchedulerConfig()


def test_plans_are_made_one_step_ahead_at_most_and_only_when_asked_for() -> None:
    assert load().settings.engine.pipeline_depth == 0
    assert load(None, {"engine.pipeline_depth": 1}).settings.engine.pipeline_depth == 1
    with pytest.raises(SettingsError, match=r"engine\.pipeline_depth"):
        load(None, {"engine.pipeline_depth": 2})


def test_every_setting_is_described_once() -> None:
    described = load().describe()
    paths = [entry.path for entry in described]
    assert len(paths) == len(set(paths)) > 25
    assert {entry.origin for entry in described} == {"default"}


@pytest.mark.parametrize(
    ("text", "environment", "cli", "message"),
    [
        ("[kv]\nnum_block = 1\n", {}, {}, "kv.num_block is no setting (from file)"),
        ("[kvv]\nnum_blocks = 1\n", {}, {}, "kvv is no setting (from file)"),
        ("", {"VORRANG_KV__BLOCKS": "1"}, {}, "kv.blocks is no setting (from env)"),
        ("", {"VORRANG_KVV__BLOCKS": "1"}, {}, "kvv is no setting (from env, VORRANG_KVV__BLOCKS)"),
        (
            "",
            {},
            {"kv.num_blocks": 0},
            "kv.num_blocks: input should be greater than or equal to 1, got 0 (from cli)",
        ),
        ("[kv]\nnum_blocks = 'x'\n", {}, {}, "got 'x' (from file)"),
        ("", {"VORRANG_LOG__LEVEL": "loud"}, {}, "got 'loud' (from env)"),
        ("", {"VORRANG_SERVER__LISTEN": "nowhere"}, {}, "server.listen: "),
        ("", {}, {"scheduler.max_step_tokens": 1}, "scheduler.max_step_tokens must be at least max_running"),
        ("", {}, {"scheduler.policy": "lottery"}, "lottery"),
        ("[scheduler.batch]\nwatermark = 1.5\n", {}, {}, "scheduler.batch.watermark must be at least 0"),
        ("[scheduler.batch]\nwater = 1\n", {}, {}, "scheduler.batch.water"),
        ("", {}, {"kv.num_blocks": 1, "kv.bytes": 1}, "kv.bytes must not be set together with kv.num_blocks"),
        ("kv = 1\n", {}, {}, "kv: input should be"),
        ("[kv\n", {}, {}, "can't be read"),
    ],
)
def test_bad_settings_name_setting_rule_value_and_origin(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    environment: dict[str, str],
    cli: dict[str, object],
    message: str,
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        load(write(tmp_path, text), cli)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        load(tmp_path / "nothing.toml")


def test_variables_that_are_no_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VORRANG_TEST_TARGET", "x")
    monkeypatch.setenv("VORRANGX_KV__NUM_BLOCKS", "x")
    load()


def test_settings_are_frozen() -> None:
    settings = load().settings
    with pytest.raises(ValueError, match="frozen"):
        settings.kv.num_blocks = 5  # type: ignore[misc]


def test_what_cards_and_ranks_need_reaches_the_model() -> None:
    settings = load(
        None,
        {
            "engine.device": "cuda",
            "engine.tensor_parallel": 4,
            "engine.runner_hang_s": 3.0,
            "kv.device_share": 0.5,
            "scheduler.max_running_requests": 7,
        },
    ).settings
    arguments = model_arguments(settings)

    wanted = {"device": "cuda", "tensor_parallel": 4, "hang_s": 3.0, "kv_share": 0.5, "max_requests": 7}
    assert wanted.items() <= arguments.items()
    assert arguments.keys() <= inspect.signature(registry.load_model).parameters.keys()


def test_adapters_of_file_environment_and_command_line_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vorrang.toml"
    file.write_text('[model.adapters]\na = "/file"\nb = "/file"\n')
    monkeypatch.setenv("VORRANG_MODEL__ADAPTERS__B", "/env")
    loaded = load(file, {"model.adapters": {"c": "/cli"}})
    wanted = {"a": "/file", "b": "/env", "c": "/cli"}
    assert model_arguments(loaded.settings)["adapters"] == wanted
    assert loaded.origins["model.adapters.b"] == "env"
    with pytest.raises(SettingsError, match=r"model\.adapters\.a b"):
        load(None, {"model.adapters": {"a b": "/cli"}})


@pytest.mark.parametrize(("setting", "value"), [("engine.runner", "inline"), ("model.path", "scripted")])
def test_ranks_need_a_real_model_and_a_process_that_leads_them(setting: str, value: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"engine\.tensor_parallel must be 1 with {setting} {value}, got 2"
    ):
        load(None, {"engine.tensor_parallel": 2, setting: value})


def test_a_token_in_the_place_of_its_hash_is_not_echoed() -> None:
    with pytest.raises(SettingsError, match=r"tenants\.a\.token_hashes\.0: ") as caught:
        load(None, {"tenants.a.token_hashes": [canaries.TOKEN]})
    canaries.check(str(caught.value), "the refusal")


def test_hashes_and_passwords_are_not_described() -> None:
    known = "sha256:" + "0" * 64
    loaded = load(None, {"tenants.a.token_hashes": [known], "tracing.otlp_endpoint": canaries.URL})
    values = {entry.path: str(entry.value) for entry in loaded.describe()}
    assert values["tenants.a.token_hashes"] == f"1 {HIDDEN}"
    assert values["tracing.otlp_endpoint"] == f"http://{HIDDEN}@127.0.0.1:4317"
    canaries.check(str(values), "what is described")
    assert loaded.settings.tracing.otlp_endpoint == canaries.URL


def test_nothing_made_of_settings_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VORRANG_TRACING__OTLP_ENDPOINT", canaries.URL)
    hashed = hash_of(canaries.TOKEN)
    loaded = load(None, {"tenants.a.token_hashes": [hashed]})
    for shown in (repr(loaded), str(loaded.settings), repr(loaded.describe()), f"{loaded.settings!r:.9000}"):
        canaries.check(shown, "settings as text")
        assert hashed not in shown


@pytest.mark.parametrize("field", ["token_hashes", "certificate_subjects", "weight", "unknown"])
def test_no_refusal_repeats_what_it_was_given_for_a_secret(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError) as caught:
        TenantSection.model_validate({field: {"a": canaries.TOKEN}})
    canaries.check(str(caught.value), "pydantic's own words")
    monkeypatch.setenv("VORRANG_TENANTS", f'{{"a": {{"token_hashes": ["{canaries.TOKEN}"]}}}}')
    with pytest.raises(SettingsError, match="token_hashes") as refused:
        load()
    canaries.check(str(refused.value), "a refusal of what the environment says")
    monkeypatch.setenv("VORRANG_TENANTS", f'{{"a": "{canaries.TOKEN}')
    with pytest.raises(SettingsError) as refused:
        load()
    canaries.check(str(refused.value), "a refusal of what can't be read")
