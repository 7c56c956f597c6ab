"""Checkpoints are whole or absent, whatever happens while they are written."""

import asyncio
import hashlib
import json
import os

import pytest

from miles.core import notes
from miles.core.errors import CheckpointError
from miles.core.notes import Written
from miles.schedule import recover
from miles.schedule.recover import Checkpoints, Cursor, read_cursor


def writer(text: str):
    async def write(folder):
        (folder / "weights.bin").write_text(text)

    return write


def save(checkpoints: Checkpoints, step: int, write=None) -> str:
    cursor = Cursor(step=step, version=step, ticket=4, dealt=(6, 9), source={"epoch": 1}, marks={"events": 12})
    return asyncio.run(checkpoints.save(cursor, write or writer(f"weights {step}")))


def test_what_was_saved_is_found_again(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    assert [save(checkpoints, step) for step in (2, 10, 4)] == ["step-000002", "step-000010", "step-000004"]
    folder, cursor = checkpoints.latest()
    assert folder.name == "step-000010" and (folder / "weights.bin").read_text() == "weights 10"
    assert cursor == Cursor(step=10, version=10, ticket=4, dealt=(6, 9), source={"epoch": 1}, marks={"events": 12})


def test_only_the_last_few_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
    assert sorted(os.listdir(tmp_path)) == ["step-000003", "step-000004"]


def test_a_write_that_dies_leaves_the_checkpoint_before(tmp_path):
    checkpoints = Checkpoints(tmp_path)
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
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    async def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-000002: No space left on device; .*latest: step-000001"):
        save(checkpoints, 2, full)
    assert checkpoints.latest()[1].step == 1
    assert os.listdir(tmp_path) == ["step-000001"], "nothing of it is left to take up room"


@pytest.mark.parametrize("harm", ["flip a byte", "cut short", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path)
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
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    listing = json.loads((tmp_path / "step-000001" / "manifest.json").read_text())
    assert set(listing) == {"weights.bin", "cursor.json"}
    assert read_cursor(tmp_path / "step-000001").step == 1


# -- ranks that write by themselves -----------------------------------------------------------


def ranked(*told):
    """A trainer whose ranks have left these notes when it returns: files, a failure, or nothing yet."""

    async def write(folder):
        notes.announce(folder, len(told))
        for rank, word in enumerate(told):
            leave(folder, rank, word)

    return write


def leave(folder, rank, word):
    if isinstance(word, str):
        notes.tell_failure(folder, rank, word)
    elif word is not None:
        for name, text in word.items():
            (folder / name).write_text(text)
        files = {n: Written(len(t), hashlib.sha256(t.encode()).hexdigest()) for n, t in word.items()}
        notes.tell(folder, rank, files)


def test_what_the_ranks_say_of_their_files_is_what_the_manifest_says(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, ranked({"a.bin": "alpha"}, {"b.bin": "beta"}))
    folder = tmp_path / "step-000001"
    assert sorted(os.listdir(folder)) == ["a.bin", "b.bin", "cursor.json", "manifest.json"], "the notes are gone"
    read_cursor(folder)
    (folder / "b.bin").write_text("BETA")
    with pytest.raises(CheckpointError, match=r"b\.bin is missing or damaged"):
        read_cursor(folder)


def test_a_rank_that_gave_up_is_named_and_its_draft_is_gone(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(CheckpointError, match=r"step-000002: rank 1 could not write b: full; .*latest: step-000001"):
        save(checkpoints, 2, ranked({"a.bin": "alpha"}, "rank 1 could not write b: full"))
    assert os.listdir(tmp_path) == ["step-000001"]


def test_a_rank_that_says_nothing_is_named_when_nothing_moves_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(recover, "_PATIENCE", 0.0)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="nothing was heard from rank 1"):
        save(checkpoints, 2, ranked({"a.bin": "alpha"}, None))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("harm", ["gone", "shorter"])
def test_a_file_that_is_not_what_its_rank_said_is_not_sealed(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path)
    written = ranked({"a.bin": "alpha"})

    async def spoilt(folder):
        await written(folder)
        (folder / "a.bin").unlink() if harm == "gone" else (folder / "a.bin").write_text("al")

    with pytest.raises(CheckpointError, match=r"a\.bin"):
        save(checkpoints, 1, spoilt)


def test_a_draft_that_an_earlier_life_still_writes_to_is_not_the_next_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = asyncio.run(checkpoints.begin(Cursor(step=2, version=2), ranked(None)))
    second = asyncio.run(checkpoints.begin(Cursor(step=2, version=2), ranked({"a.bin": "alpha"})))
    assert not first.folder.exists() and second.folder.exists()
    with pytest.raises(FileNotFoundError):
        leave(first.folder, 0, {"a.bin": "late"})
    checkpoints.finish(second)
    assert (tmp_path / "step-000002" / "a.bin").read_text() == "alpha"
