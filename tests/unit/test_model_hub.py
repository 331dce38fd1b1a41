"""Models by their id on a hub: what is downloaded, what is kept, and what happens without it."""

import pytest

from engine.models.errors import HubUnreachable, ModelNotFound, UnsupportedModel
from engine.models.hub import HubModel
from engine.models.registry import find_model, load
from tests.support.hub import COMMIT, TAG, FakeHub
from tests.support.models import tiny_llama

REPOSITORY = "somebody/tiny-llama"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_llama(folder, tie_word_embeddings=False, shard_size="60KB")
    (folder / "consolidated.safetensors").write_text("another copy")
    (folder / "model.bin").write_text("another format")
    (folder / "small.gguf").write_text("a GGUF file")
    return folder


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch):
    """A hub, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    found = FakeHub(checkpoint, REPOSITORY)
    with found.serving() as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield found


def test_a_model_is_downloaded_once_and_then_served_offline(hub, monkeypatch):
    name, folder = find_model(REPOSITORY)

    assert name == "tiny-llama"
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < files
    assert not files & {"model.bin", "consolidated.safetensors", "small.gguf"}
    loaded = load(REPOSITORY, offline=True, num_blocks=8, num_threads=1)
    assert loaded.info.architecture == "LlamaForCausalLM"

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # nobody is there
    assert find_model(REPOSITORY)[1] == folder


@pytest.mark.parametrize("revision", [TAG, COMMIT])
def test_a_revision_is_a_tag_or_a_commit(hub, revision):
    assert find_model(REPOSITORY, revision=revision)[1].name == COMMIT


def test_a_tokenizer_comes_without_weights(hub):
    _, folder = find_model(REPOSITORY, tokenizer_only=True)

    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("*.safetensors"))


def test_a_gguf_file_is_one_of_a_repository(hub):
    assert HubModel.try_parse(f"{REPOSITORY}/small.gguf").fetched().read_text() == "a GGUF file"
    with pytest.raises(ModelNotFound, match=r"has no file other\.gguf"):
        find_model(f"{REPOSITORY}/other.gguf")


def test_what_the_hub_does_not_have_is_not_found(hub):
    with pytest.raises(ModelNotFound, match="there is no model somebody/else on the hub"):
        find_model("somebody/else")
    with pytest.raises(ModelNotFound, match=f"there is no hub model {REPOSITORY} at revision nope"):
        find_model(REPOSITORY, revision="nope")


def test_without_a_hub_what_was_not_downloaded_is_a_typed_error(hub, monkeypatch):
    with pytest.raises(HubUnreachable, match=f"hub model {REPOSITORY} was not .* model.offline is true"):
        find_model(REPOSITORY, offline=True)
    assert hub.asked == []

    find_model(REPOSITORY, tokenizer_only=True)  # a part of it is not enough
    with pytest.raises(HubUnreachable):
        find_model(REPOSITORY, offline=True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(HubUnreachable, match="the hub does not answer"):
        find_model("somebody/new", revision=TAG)


def test_a_local_model_has_no_revision(checkpoint):
    with pytest.raises(UnsupportedModel, match="revision must be absent for a model that is no hub's"):
        find_model(str(checkpoint), revision="main")


@pytest.mark.parametrize(
    ("model", "parsed"),
    [
        ("owner/name", HubModel("owner/name")),
        ("owner/name-1.5_x/a/b.Q4_K_M.gguf", HubModel("owner/name-1.5_x", "a/b.Q4_K_M.gguf")),
        ("/owner/name", None),
        ("./name", None),
        ("name", None),
        ("owner/name/folder", None),
        ("owner/nämé", None),
    ],
)
def test_an_id_has_an_owner_and_a_name(model, parsed):
    assert HubModel.try_parse(model) == parsed
