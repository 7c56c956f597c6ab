"""Checkpoints are whole or absent, whatever happens while they are written."""

import asyncio
import hashlib
import json
import os

import pytest

from miles.core import markers
from miles.core.errors import CheckpointError
from miles.core.markers import FileDigest
from miles.schedule import checkpoints as recover
from miles.schedule.checkpoints import CheckpointDirectory, Cursor, read_cursor


def writer(text: str):
    async def write(folder):
        (folder / "weights.bin").write_text(text)

    return write


def save(checkpoints: CheckpointDirectory, step: int, write=None) -> str:
    cursor = Cursor(
        step=step, version=step, ticket=4, done_tickets=(6, 9), source={"epoch": 1}, log_offsets={"events": 12}
    )
    return asyncio.run(checkpoints.save(cursor, write or writer(f"weights {step}")))


def test_what_was_saved_is_found_again(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    assert [save(checkpoints, step) for step in (2, 10, 4)] == ["step-000002", "step-000010", "step-000004"]
    folder, cursor = checkpoints.latest()
    assert folder.name == "step-000010" and (folder / "weights.bin").read_text() == "weights 10"
    assert cursor == Cursor(
        step=10, version=10, ticket=4, done_tickets=(6, 9), source={"epoch": 1}, log_offsets={"events": 12}
    )


def test_only_the_last_few_are_kept(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
    assert sorted(os.listdir(tmp_path)) == ["step-000003", "step-000004"]


def test_a_write_that_dies_leaves_the_checkpoint_before(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path)
    save(checkpoints, 1)

    async def dies(folder):
        (folder / "weights.bin").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 2, dies)
    assert checkpoints.latest()[1].step == 1
    save(checkpoints, 3)  # and what was left behind is gone
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000003"]


def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path)
    save(checkpoints, 1)

    async def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-000002: No space left on device; .*latest: step-000001"):
        save(checkpoints, 2, full)
    assert checkpoints.latest()[1].step == 1
    assert os.listdir(tmp_path) == ["step-000001"], "nothing of it is left to take up room"


@pytest.mark.parametrize("harm", ["flip a byte", "cut short", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, harm):
    checkpoints = CheckpointDirectory(tmp_path)
    save(checkpoints, 1)
    victim = tmp_path / "step-000001" / ("manifest.json" if harm == "no manifest" else "weights.bin")
    if harm == "flip a byte":
        victim.write_text("Weights 1")
    elif harm == "cut short":
        victim.write_text("weigh")
    else:
        victim.unlink()
    with pytest.raises(CheckpointError, match="step-000001"):
        checkpoints.latest()


def test_the_manifest_lists_every_file(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path)
    save(checkpoints, 1)
    listing = json.loads((tmp_path / "step-000001" / "manifest.json").read_text())
    assert set(listing) == {"weights.bin", "cursor.json"}
    assert read_cursor(tmp_path / "step-000001").step == 1


@pytest.mark.parametrize(
    "manifest",
    [
        "{}",
        "[]",
        "null",
        "3",
        '{"weights.bin": {"bytes": 9}}',
        '{"cursor.json": 3}',
        '{"cursor.json": {"bytes": "x", "sha256": ""}}',
    ],
)
def test_a_manifest_that_lists_too_little_is_refused(tmp_path, manifest):
    checkpoints = CheckpointDirectory(tmp_path)
    save(checkpoints, 1)
    (tmp_path / "step-000001" / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="step-000001 is not a valid checkpoint"):
        checkpoints.latest()


@pytest.mark.parametrize("cursor", ["{}", "[]", '{"step": 1}', '{"step": 1, "version": 1, "done_tickets": 3}'])
def test_a_cursor_without_its_fields_is_refused(tmp_path, cursor):
    checkpoints = CheckpointDirectory(tmp_path)
    save(checkpoints, 1)
    folder = tmp_path / "step-000001"
    (folder / "cursor.json").write_text(cursor)
    digest = {"bytes": len(cursor), "sha256": hashlib.sha256(cursor.encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"cursor.json": digest}))
    with pytest.raises(CheckpointError, match="step-000001 is not a valid checkpoint"):
        checkpoints.latest()


def test_a_deletion_that_dies_leaves_no_folder_that_looks_complete(tmp_path, monkeypatch):
    checkpoints = CheckpointDirectory(tmp_path, keep=1)
    save(checkpoints, 1)

    def dies(folder, **options):
        (folder / "weights.bin").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(recover.shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 2)
    monkeypatch.undo()
    assert [name for name in os.listdir(tmp_path) if name.startswith("step-")] == ["step-000002"]
    save(checkpoints, 3)
    assert os.listdir(tmp_path) == ["step-000003"]


def test_a_deletion_that_fails_is_one_sentence_and_the_new_checkpoint_stays(tmp_path, monkeypatch):
    checkpoints = CheckpointDirectory(tmp_path, keep=1)
    save(checkpoints, 1)

    def fails(folder, **options):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(recover.shutil, "rmtree", fails)
    with pytest.raises(CheckpointError, match=r"could not be deleted \(Permission denied\).*step-000002, is complete"):
        save(checkpoints, 2)
    assert checkpoints.latest()[1].step == 2


def test_the_manifest_lists_dtype_and_shape_of_tensors(tmp_path):
    async def write(folder):
        header = json.dumps({"w": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))

    save(CheckpointDirectory(tmp_path), 1, write)
    listing = json.loads((tmp_path / "step-000001" / "manifest.json").read_text())
    assert listing["model.safetensors"]["tensors"] == {"w": {"dtype": "F32", "shape": [2, 1]}}
    payload = tmp_path / "step-000001" / "model.safetensors"
    recover.verify_weights(tmp_path / "step-000001")
    payload.write_bytes(payload.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or damaged; name another checkpoint"):
        recover.verify_weights(tmp_path / "step-000001")


# -- ranks that write by themselves -----------------------------------------------------------


def ranked(*expected):
    """A trainer whose ranks have left these notes when it returns: files, a failure, or nothing yet."""

    async def write(folder):
        markers.announce_ranks(folder, len(expected))
        for rank, word in enumerate(expected):
            leave(folder, rank, word)

    return write


def leave(folder, rank, word):
    if isinstance(word, str):
        markers.mark_failed(folder, rank, word)
    elif word is not None:
        for name, text in word.items():
            (folder / name).write_text(text)
        files = {n: FileDigest(len(t), hashlib.sha256(t.encode()).hexdigest()) for n, t in word.items()}
        markers.mark_complete(folder, rank, files)


def test_what_the_ranks_say_of_their_files_is_what_the_manifest_says(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path)
    save(checkpoints, 1, ranked({"a.bin": "alpha"}, {"b.bin": "beta"}))
    folder = tmp_path / "step-000001"
    assert sorted(os.listdir(folder)) == ["a.bin", "b.bin", "cursor.json", "manifest.json"], "the notes are gone"
    read_cursor(folder)
    (folder / "b.bin").write_text("BETA")
    with pytest.raises(CheckpointError, match=r"b\.bin is missing or damaged"):
        read_cursor(folder)


def test_a_rank_that_gave_up_is_named_and_its_draft_is_gone(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(CheckpointError, match=r"step-000002: rank 1 could not write b: full; .*latest: step-000001"):
        save(checkpoints, 2, ranked({"a.bin": "alpha"}, "rank 1 could not write b: full"))
    assert os.listdir(tmp_path) == ["step-000001"]


def test_a_rank_that_says_nothing_is_named_when_nothing_moves_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(recover, "_TIMEOUT", 0.0)
    checkpoints = CheckpointDirectory(tmp_path)
    with pytest.raises(CheckpointError, match="rank 1 did not report"):
        save(checkpoints, 2, ranked({"a.bin": "alpha"}, None))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("harm", ["gone", "shorter"])
def test_a_file_that_is_not_what_its_rank_said_is_not_sealed(tmp_path, harm):
    checkpoints = CheckpointDirectory(tmp_path)
    written = ranked({"a.bin": "alpha"})

    async def spoilt(folder):
        await written(folder)
        (folder / "a.bin").unlink() if harm == "gone" else (folder / "a.bin").write_text("al")

    with pytest.raises(CheckpointError, match=r"a\.bin"):
        save(checkpoints, 1, spoilt)


def test_a_draft_that_an_earlier_life_still_writes_to_is_not_the_next_ones(tmp_path):
    checkpoints = CheckpointDirectory(tmp_path)
    first = asyncio.run(checkpoints.begin(Cursor(step=2, version=2), ranked(None)))
    second = asyncio.run(checkpoints.begin(Cursor(step=2, version=2), ranked({"a.bin": "alpha"})))
    assert not first.folder.exists() and second.folder.exists()
    with pytest.raises(FileNotFoundError):
        leave(first.folder, 0, {"a.bin": "late"})
    checkpoints.finish(second)
    assert (tmp_path / "step-000002" / "a.bin").read_text() == "alpha"
