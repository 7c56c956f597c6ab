"""TensorBoard's own reader finds what was written."""

from tests.observe.example_events import finished, group, taken

from miles.core.events import Evaluated, RunStarted
from miles.observe.tensorboard import TensorBoard
from miles.observe.tracker_records import RecordBuilder


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def scalars(folder):
    found = read(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def write(folder, *events, samples=0):
    build = RecordBuilder(max_samples=samples)
    tracker = TensorBoard(folder, clock=lambda: 100.0)
    tracker.open()
    for event in events:
        if (record := build(event)) is not None:
            tracker.log(record)
    tracker.close()


def test_train_eval_and_seconds_have_their_own_sections(tmp_path):
    held_out = Evaluated(step=2, metrics={"eval/easy/reward": 0.75}, seconds={"evaluate": 2.0})
    write(tmp_path / "tb", RunStarted(step=0, steps=2), finished(1, reward=0.25), finished(2, reward=0.5), held_out)
    seen = scalars(tmp_path / "tb")
    assert seen["train/reward"] == [(1, 0.25), (2, 0.5)]
    assert seen["eval/easy/reward"] == [(2, 0.75)]
    assert seen["seconds/rollout"] == [(1, 0.5), (2, 0.5)] and seen["seconds/evaluate"] == [(2, 2.0)]


def test_a_continued_run_hides_the_points_it_repeats(tmp_path):
    write(tmp_path, *(finished(step, reward=step / 8) for step in (1, 2, 3, 4)))
    write(tmp_path, RunStarted(step=2, steps=5), *(finished(step, reward=step / 8) for step in (3, 4, 5)))
    assert scalars(tmp_path)["train/reward"] == [(step, step / 8) for step in (1, 2, 3, 4, 5)]


def test_samples_are_a_text_table_that_no_response_can_break(tmp_path):
    batch = taken(3, [group(7, [0.0, 1.0], text="a | b\n# `title`")])
    write(tmp_path, batch, finished(3), samples=2)
    (event,) = read(tmp_path).Tensors("samples")
    assert event.step == 3
    head, _, first, second = event.tensor_proto.string_val[0].decode().splitlines()
    assert head.split(" | ")[3] == "reward"
    assert first.count("`a \\| b ⏎ # 'title'`") == 1 and "| 0.0 |" in first and "| 1.0 |" in second
