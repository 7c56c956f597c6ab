"""Checkpoints in object stores, with the stores of fsspec that need no network: memory and files."""

import shutil
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from tests.launch.small_run import everything, flags, write_inputs

from miles.cluster.hub_client import HubError
from miles.core.events import Saved
from miles.launch.hub.mirror import CheckpointMirror, restore_run
from miles.launch.hub.object_store import stage_checkpoint, url_from_folder
from miles.launch.main import main

URL = "memory://bucket/tiny"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "cache"))
    found = fsspec.filesystem("memory")
    for name, size in (("config.json", 10), ("tokenizer.json", 20), ("model.safetensors", 500), ("notes.pdf", 9)):
        found.pipe_file(f"/bucket/tiny/{name}", b"x" * size)
    yield found
    found.store.clear()


def test_what_a_model_needs_is_copied_once_and_again_when_it_changes(store: fsspec.AbstractFileSystem) -> None:
    folder, missing = stage_checkpoint(URL, weights=False)
    assert missing == 500
    assert sorted(file.name for file in folder.glob("[!.]*")) == ["config.json", "tokenizer.json"]
    folder, missing = stage_checkpoint(URL, weights=True)
    assert missing == 0
    assert url_from_folder(str(folder)) == URL
    copied = (folder / "model.safetensors").stat()
    stage_checkpoint(URL, weights=True)
    assert (folder / "model.safetensors").stat() == copied
    store.pipe_file("/bucket/tiny/model.safetensors", b"y" * 500)
    stage_checkpoint(URL, weights=True)
    assert (folder / "model.safetensors").read_bytes() == b"y" * 500


def test_what_cannot_be_copied_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="cannot be listed"):
        stage_checkpoint("memory://bucket/none", weights=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HubError, match=r"has no config\.json"):
        stage_checkpoint(f"file://{tmp_path / 'empty'}", weights=True)
    with pytest.raises(HubError, match="cannot be used"):
        stage_checkpoint("nothing://bucket/a", weights=True)


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_the_package_of_a_scheme_is_named() -> None:
    with pytest.raises(HubError, match=r"needs the package s3fs: pip install 'miles-rl\[s3\]'"):
        stage_checkpoint("s3://bucket/a", weights=True)


def test_a_run_records_the_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = write_inputs(tmp_path / "world")
    url = f"file://{world}"
    argv = [url if word == str(world) else word for word in flags(world, tmp_path / "run", steps=2)]
    assert main(["plan", *argv]) == 0
    assert f"{url}: " in capsys.readouterr().out
    assert main(["train", *argv]) == 0
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert stored["models"]["hf_checkpoint"] == url
    assert main(["train", *argv]) == 0


def test_a_run_whose_directory_is_lost_resumes_from_its_mirror_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = write_inputs(tmp_path / "world")
    whole, lost, remote = tmp_path / "whole", tmp_path / "lost", tmp_path / "remote"
    assert main(["train", *flags(world, whole, steps=4)]) == 0
    argv = flags(world, lost, "--save-remote", f"file://{remote}", steps=4)
    assert main(["train", *argv]) == 0
    assert [folder.name for folder in sorted((remote / "checkpoints").iterdir())] == ["step-000002", "step-000004"]

    shutil.rmtree(lost)
    (remote / "checkpoints" / "step-000004" / "manifest.json").unlink()  # as if the copy had been cut off
    capsys.readouterr()
    assert main(["train", *argv, "--keep-checkpoints", "1"]) == 0
    assert f"step-000002 was copied back from file://{remote}" in capsys.readouterr().out
    assert everything(lost) == everything(whole)
    assert [folder.name for folder in sorted((remote / "checkpoints").iterdir())] == ["step-000004"]


def test_a_checkpoint_without_its_manifest_is_not_restored(tmp_path: Path) -> None:
    remote = tmp_path / "remote" / "checkpoints" / "step-000002"
    remote.mkdir(parents=True)
    (remote / "config.json").write_text("{}")
    assert restore_run(f"file://{tmp_path / 'remote'}", tmp_path / "run") is None
    assert not (tmp_path / "run").exists()


def test_a_store_that_fails_is_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    mirror = CheckpointMirror("nothing://bucket/run", tmp_path, keep=None, note=notes.append)
    mirror(Saved(step=2, name="step-000002"))
    assert not mirror.close()
    assert "step-000002 was not copied to nothing://bucket/run" in notes[0]
