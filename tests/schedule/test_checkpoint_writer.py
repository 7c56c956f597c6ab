"""Asynchronous checkpoint writer: one save at a time, reported when complete, errors raised."""

import asyncio
import os
import threading
from dataclasses import replace

import pytest
from tests.schedule.test_loop import Harness

from miles.core import markers
from miles.core.errors import CheckpointError, MilesError
from miles.core.events import RunEnded, Saved, SaveFailed, StepFinished
from miles.schedule.checkpoints import CheckpointDirectory, read_cursor
from miles.schedule.loop import Interval, Loop, LoopSettings


class Slow(Harness):
    """A harness whose trainer saves in a thread, when ``may`` says so; ``fails`` names steps it cannot save."""

    def __init__(self, folder, *, fails=(), may=None, **checkpoints):
        super().__init__(folder)
        self.planes = replace(self.planes, checkpoints=CheckpointDirectory(folder, background=True, **checkpoints))
        self.fails, self.may, self.writing = fails, may, 0

    async def save(self, folder):
        assert not self.writing, "two at once"
        self.writing += 1
        markers.announce_ranks(folder, 1)
        threading.Thread(target=self._write, args=(folder, self.trained), daemon=True).start()

    def _write(self, folder, step):
        if self.may is not None:
            assert self.may.wait(60)
        (folder / "trained").write_text(str(step))
        self.writing -= 1
        if step in self.fails:
            markers.mark_failed(folder, 0, f"rank 0 could not write trained: no luck at {step}")
        else:
            markers.mark_complete(folder, 0, {})


def run(harness, steps=6, every=2):
    loop = Loop(harness.planes, LoopSettings(steps=steps, groups_per_step=2, save=Interval(every=every, at_end=True)))
    asyncio.run(loop.run())
    return loop


def list_events(harness, kind):
    return [event.step for event in harness.events if isinstance(event, kind)]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """The first save ends only after step 3, so it cannot have been waited for; the next save waits."""
    may = threading.Event()
    harness = Slow(tmp_path, may=may)
    harness.planes.journal.hear = lambda e: may.set() if isinstance(e, StepFinished) and e.step == 3 else None
    assert run(harness).finished
    assert list_events(harness, Saved) == [2, 4, 6]
    kinds = [(type(e), e.step) for e in harness.events if isinstance(e, StepFinished | Saved | RunEnded)]
    assert kinds.index((Saved, 2)) > kinds.index((StepFinished, 3))
    assert kinds.index((Saved, 4)) < kinds.index((RunEnded, 6)) and kinds[-2:] == [(Saved, 6), (RunEnded, 6)]
    assert not any(e.scheduled for e in harness.events if isinstance(e, Saved)), "when it ends is no function of a seed"
    assert {name: (tmp_path / name / "trained").read_text() for name in os.listdir(tmp_path)} == {
        "step-000002": "2",
        "step-000004": "4",
        "step-000006": "6",
    }


def test_the_cursor_is_that_of_the_copy_and_not_of_the_end_of_writing(tmp_path):
    may = threading.Event()
    harness = Slow(tmp_path, may=may)
    harness.planes.journal.hear = lambda e: may.set() if isinstance(e, StepFinished) and e.step == 3 else None
    run(harness, steps=3)
    calm = Harness(tmp_path / "calm")
    tempo = LoopSettings(steps=3, groups_per_step=2, save=Interval(every=2, at_end=True))
    asyncio.run(Loop(calm.planes, tempo).run())
    for name in ("step-000002", "step-000003"):
        mine, theirs = (read_cursor(folder / name) for folder in (tmp_path, tmp_path / "calm"))
        assert replace(mine, log_offsets={}) == replace(theirs, log_offsets={})
    assert (
        read_cursor(tmp_path / "step-000002").log_offsets == read_cursor(tmp_path / "calm" / "step-000002").log_offsets
    )


def test_a_checkpoint_that_could_not_be_written_ends_the_run_and_leaves_the_one_before(tmp_path):
    harness = Slow(tmp_path, fails=(4,))
    with pytest.raises(CheckpointError, match=r"step-000004: rank 0 .* no luck at 4; .*latest: step-000002"):
        run(harness)
    assert os.listdir(tmp_path) == ["step-000002"]


def test_with_warn_the_run_goes_on_and_the_next_checkpoint_is_tried(tmp_path):
    harness = Slow(tmp_path, fails=(2,), forgiving=True)
    assert run(harness).finished
    assert list_events(harness, SaveFailed) == [2] and list_events(harness, Saved) == [4, 6]
    assert sorted(os.listdir(tmp_path)) == ["step-000004", "step-000006"]


@pytest.mark.parametrize("behind", [True, False])
def test_the_last_checkpoint_is_never_done_without(tmp_path, behind):
    harness = Slow(tmp_path, fails=(6,), forgiving=True)
    harness.planes.checkpoints.background = behind
    with pytest.raises(CheckpointError, match="no luck at 6"):
        run(harness)


def test_an_error_elsewhere_is_the_one_shown_and_the_checkpoint_under_way_is_still_made(tmp_path):
    may = threading.Event()
    harness = Slow(tmp_path, may=may)
    step = harness.step

    async def broken(batch):
        if batch.step == 3:
            may.set()
            raise MilesError("NaN in step 3")
        return await step(batch)

    harness.step = broken
    with pytest.raises(MilesError, match="NaN in step 3"):
        run(harness)
    assert os.listdir(tmp_path) == ["step-000002"]
