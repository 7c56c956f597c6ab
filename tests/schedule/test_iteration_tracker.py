"""Megatron's names of a run's checkpoints."""

import shutil
from pathlib import Path

from miles.core.events import Saved
from miles.models.checkpoint.torch_dist_folders import find_torch_dist, format_iteration, write_tracker
from miles.schedule.iteration_tracker import IterationTracker


def save(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


def test_the_newest_checkpoint_is_found_by_megatrons_names(tmp_path: Path):
    tracker = IterationTracker(tmp_path, format_iteration, write_tracker)
    for step in (2, 4):
        save(tmp_path, step)
        tracker(Saved(step=step, name=f"step-{step:06d}"))
        found = find_torch_dist(tmp_path)
        assert found is not None and found.name == f"iter_000000{step}"
        assert found.resolve() == (tmp_path / "checkpoints" / f"step-{step:06d}").resolve()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    # What --keep-checkpoints deleted has no name any more; what is saved again keeps its own.
    shutil.rmtree(tmp_path / "checkpoints" / "step-000002")
    tracker(Saved(step=4, name="step-000004"))
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004"]


def test_a_moved_run_keeps_its_names(tmp_path: Path):
    save(tmp_path / "run", 1)
    IterationTracker(tmp_path / "run", format_iteration, write_tracker)(Saved(step=1, name="step-000001"))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "iter_0000001" / "metadata.json").is_file()
