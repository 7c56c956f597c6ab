"""Checkpoints are whole or absent, whatever happens while they are written."""

import asyncio
import json
import os

import pytest

from miles.core.errors import CheckpointError
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
