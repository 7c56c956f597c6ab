"""Splits of datasets on the hub, found by the dataset's README, by file names, or in the hub's Parquet copy."""

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.fake_hub import FakeHub, serving, use_hub

from miles.core.errors import DataError
from miles.core.hub_names import HubName, parse_hub_name
from miles.rollout.data.hub_dataset import fetch_dataset, select_files
from miles.rollout.data.paths import parse_entry, read_rows, resolve_files

README = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# Grade school
"""


def parquet(*questions: str) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"question": list(questions)}), out)
    return out.getvalue()


GSM8K = {
    "README.md": README,
    "main/train-00000-of-00002.parquet": parquet("a", "b"),
    "main/train-00001-of-00002.parquet": parquet("c"),
    "main/test-00000-of-00001.parquet": parquet("d"),
    "socratic/train-00000-of-00001.parquet": parquet("e"),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving() as found:
        use_hub(monkeypatch, found.url, tmp_path / "hub")
        yield found


def fetch(text: str) -> HubName:
    name = parse_hub_name("dataset", text)
    assert name is not None
    return fetch_dataset(name)


def questions(entry: str) -> list[str]:
    return [row.columns["question"] for row in read_rows(entry)]


def test_a_split_is_downloaded_and_its_rows_are_read_in_file_order(hub: FakeHub) -> None:
    sha = hub.commit("dataset", "openai/gsm8k", GSM8K)
    name = fetch("openai/gsm8k@train")
    assert str(name) == f"openai/gsm8k@train@{sha}"
    assert questions(str(name)) == ["a", "b", "c"]
    assert questions(f"{name}@[1:3]") == ["b", "c"]
    assert parse_entry(f"{name}@[1:3]*0.5").path == str(name)
    hub.requests.clear()
    assert fetch("openai/gsm8k@train") == name
    assert hub.requests == []


def test_configs_and_files_are_chosen_by_name(hub: FakeHub) -> None:
    hub.commit("dataset", "openai/gsm8k", GSM8K)
    assert questions(str(fetch("openai/gsm8k:socratic@train"))) == ["e"]
    assert questions(str(fetch("openai/gsm8k:main@test"))) == ["d"]
    assert questions(str(fetch("hf://datasets/openai/gsm8k/main/test-*.parquet"))) == ["d"]
    assert questions(str(fetch("hf://datasets/openai/gsm8k/socratic"))) == ["e"]


def test_a_split_that_is_not_there_is_said_with_the_files_that_are(hub: FakeHub) -> None:
    hub.commit("dataset", "openai/gsm8k", GSM8K)
    with pytest.raises(DataError, match=r"does not name a split.*main/test-00000-of-00001.parquet"):
        fetch("openai/gsm8k:main@validation")


def test_a_missing_shard_is_downloaded_again_and_never_left_out(hub: FakeHub) -> None:
    hub.commit("dataset", "openai/gsm8k", GSM8K)
    name = fetch("openai/gsm8k@train")
    resolve_files(str(name))[1].unlink()
    with pytest.raises(DataError, match="not whole"):
        questions(str(name))
    assert questions(str(fetch("openai/gsm8k@train"))) == ["a", "b", "c"]


def test_a_dataset_of_other_files_is_read_from_the_copy_the_hub_has_of_it(hub: FakeHub) -> None:
    hub.commit("dataset", "org/csv", {"train.csv": b"question\na\n"})
    sha = hub.commit("dataset", "org/csv", {"default/train/0000.parquet": parquet("a")}, "refs/convert/parquet")
    name = fetch("org/csv@train")
    assert name.revision == sha
    assert questions(str(name)) == ["a"]
    assert fetch("org/csv@train") == name


@pytest.mark.parametrize(
    ("files", "split", "chosen"),
    [
        (["train.jsonl", "test.jsonl"], "test", ["test.jsonl"]),
        (["data/train-0.parquet", "data/test-0.parquet"], "train", ["data/train-0.parquet"]),
        (["prompts.jsonl", "test.jsonl"], "train", ["prompts.jsonl"]),
        (["main/train-0.parquet", "other/train-0.parquet"], "train", ["main/train-0.parquet"]),
        (["a/train-0.parquet", "b/train-0.parquet"], "train", []),
        (["training_set.jsonl"], "test", []),
    ],
)
def test_without_a_readme_the_names_of_files_say_their_split(files: list[str], split: str, chosen: list[str]) -> None:
    assert list(select_files(HubName(kind="dataset", repo="a/b", split=split), files, ())) == chosen
