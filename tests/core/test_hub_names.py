"""Names of models and datasets on the hub, and paths that look like them."""

from pathlib import Path

import pytest

from miles.core.errors import UsageError
from miles.core.hub_names import HubName, is_path, parse_hub_name, split_entry


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("Qwen/Qwen3-0.6B@v1.0", "Qwen/Qwen3-0.6B", "v1.0"),
        ("hf://gpt2", "gpt2", None),
        ("hf://Qwen/Qwen3-0.6B@refs/pr/3", "Qwen/Qwen3-0.6B", "refs/pr/3"),
    ],
)
def test_a_model_is_named_by_its_id(text: str, repo: str, revision: str | None) -> None:
    assert parse_hub_name("model", text) == HubName(kind="model", repo=repo, revision=revision)


@pytest.mark.parametrize(
    "name",
    [
        HubName(kind="dataset", repo="openai/gsm8k", split="train"),
        HubName(kind="dataset", repo="openai/gsm8k", split="test", subset="main"),
        HubName(kind="dataset", repo="openai/gsm8k", split="test", subset="main", revision="e53f048"),
        HubName(kind="dataset", repo="openai/gsm8k", files="main/*.parquet", revision="e53f048"),
        HubName(kind="model", repo="Qwen/Qwen3-0.6B", revision="main"),
    ],
)
def test_a_name_parses_back_to_itself(name: HubName) -> None:
    assert parse_hub_name(name.kind, str(name)) == name


@pytest.mark.parametrize(
    "text", ["/models/a", "./a/b", "../a", "a", "a/b/c", "~/a", "data/train.jsonl", "a/b*.parquet"]
)
def test_a_path_is_not_a_name(text: str) -> None:
    assert parse_hub_name("dataset", text) is None
    assert is_path("dataset", text)


def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    assert parse_hub_name("model", "Qwen/Qwen3") is None  # a missing path in a folder that exists
    assert parse_hub_name("model", "hf://Qwen/Qwen3") is not None
    assert is_path("model", "Qwen/Qwen3", str(tmp_path))
    assert not is_path("model", "Other/Qwen3", str(tmp_path))


def test_slices_and_weights_are_not_part_of_a_name() -> None:
    assert split_entry("openai/gsm8k:main@train@[10:20]*0.5") == ("openai/gsm8k:main@train", "@[10:20]*0.5")
    assert split_entry("openai/gsm8k@train") == ("openai/gsm8k@train", "")
    assert not is_path("dataset", "openai/gsm8k@train*2")


@pytest.mark.parametrize(
    ("kind", "text"), [("model", "hf://datasets/a/b"), ("dataset", "hf://a/b"), ("model", "hf://a/b/c/d")]
)
def test_a_uri_of_the_other_kind_is_refused(kind: str, text: str) -> None:
    with pytest.raises(UsageError):
        parse_hub_name("model" if kind == "model" else "dataset", text)
