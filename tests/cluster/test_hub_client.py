"""The client of the Hugging Face hub, against a hub on this machine and against a cache alone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fake_hub import FakeHub, serving, use_hub

from miles.cluster.hub_client import HubError, Snapshot, fetch_model, get_model_name, name_from_folder
from miles.core.hub_names import HubName, parse_hub_name

MODEL = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"x" * 5000, "onnx/model.onnx": b"y"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving() as found:
        use_hub(monkeypatch, found.url, tmp_path / "home" / "hub")
        yield found


def fetch(text: str, *, weights: bool = True) -> Snapshot:
    name = parse_hub_name("model", text)
    assert name is not None
    return fetch_model(name, weights=weights)


def fail(text: str) -> str:
    with pytest.raises(HubError) as caught:
        fetch(text)
    return str(caught.value)


def test_what_a_model_needs_is_downloaded_once_and_then_read_without_a_request(hub: FakeHub) -> None:
    sha = hub.commit("model", "org/tiny", MODEL)
    first = fetch("org/tiny")
    assert sorted(file.name for file in first.folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert first.name == HubName(kind="model", repo="org/tiny", revision=sha)
    hub.requests.clear()
    assert fetch("org/tiny") == first
    assert hub.requests == []


def test_a_plan_downloads_no_weights_and_measures_them(hub: FakeHub) -> None:
    hub.commit("model", "org/tiny", MODEL)
    found = fetch("org/tiny", weights=False)
    assert sorted(file.name for file in found.folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert found.missing_bytes == 5000
    assert fetch("org/tiny").missing_bytes == 0
    assert fetch("org/tiny", weights=False).missing_bytes == 0


def test_a_revision_stays_what_it_was_while_the_branch_moves_on(hub: FakeHub) -> None:
    old = hub.commit("model", "org/tiny", MODEL)
    new = hub.commit("model", "org/tiny", {"model.safetensors": b"z" * 10})
    assert (fetch(f"hf://org/tiny@{old}").folder / "model.safetensors").stat().st_size == 5000
    assert (fetch("org/tiny").folder / "model.safetensors").stat().st_size == 10
    assert fetch("org/tiny").name.revision == new
    hub.commit("model", "org/tiny", {"model.safetensors": b"w" * 20})
    assert fetch("org/tiny").name.revision == new  # the cache comes first


def test_half_a_download_is_completed(hub: FakeHub) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": b"x" for n in (1, 2)}
    index = {"weight_map": {f"w{n}": name for n, name in enumerate(shards)}}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **shards}
    hub.commit("model", "org/sharded", files)
    found = fetch("org/sharded")
    (found.folder / "model-00002-of-00002.safetensors").unlink()
    shutil.rmtree(found.folder.parents[1] / "trees")  # as a client wrote it that keeps no listing
    assert (fetch("org/sharded").folder / "model-00002-of-00002.safetensors").exists()


def test_a_folder_of_the_cache_knows_its_name(hub: FakeHub, tmp_path: Path) -> None:
    sha = hub.commit("model", "org/tiny", MODEL)
    folder = str(fetch("org/tiny").folder)
    assert str(name_from_folder(folder)) == f"hf://org/tiny@{sha}"
    assert get_model_name(folder) == "tiny"
    assert name_from_folder(str(tmp_path)) is None


def test_what_the_hub_refuses_is_one_sentence(hub: FakeHub) -> None:
    hub.commit("model", "org/tiny", MODEL)
    assert "There is no model org/other at" in fail("org/other")
    assert "has no revision nightly" in fail("org/tiny@nightly")
    hub.token = "secret"
    assert "set HF_TOKEN if it is private" in fail("org/tiny")


def test_a_token_of_the_environment_is_sent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("model", "org/tiny", MODEL)
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetch("org/tiny").folder.is_dir()


def test_offline_the_cache_is_used_and_what_it_lacks_is_said_with_the_command(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.commit("model", "org/tiny", MODEL)
    found = fetch("org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("org/tiny") == found
    sentence = fail("org/other@v2")
    assert "HF_HUB_OFFLINE is set" in sentence
    assert "run hf download org/other --revision v2 on a machine with access" in sentence
    assert "copy its models--org--other into that folder" in sentence


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "hub")
    assert "http://127.0.0.1:9 cannot be reached: run hf download org/tiny" in fail("org/tiny")
