"""TensorBoard's own reader finds what was written."""

from tests.observe.example_events import finished

from miles.core.events import Evaluated, RunStarted
from miles.observe.tensorboard import TensorBoard


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_train_eval_and_seconds_have_their_own_sections(tmp_path):
    sink = TensorBoard(tmp_path / "tb", clock=lambda: 100.0)
    sink(RunStarted(step=0, steps=2))
    sink(finished(1, reward=0.25))
    sink(finished(2, reward=0.5))
    sink(Evaluated(step=2, metrics={"eval/easy/reward": 0.75}, seconds={"evaluate": 2.0}))
    sink.commit()
    sink.close()
    seen = scalars(tmp_path / "tb")
    assert seen["train/reward"] == [(1, 0.25), (2, 0.5)]
    assert seen["eval/easy/reward"] == [(2, 0.75)]
    assert seen["seconds/rollout"] == [(1, 0.5), (2, 0.5)] and seen["seconds/evaluate"] == [(2, 2.0)]


def test_a_continued_run_hides_the_points_it_repeats(tmp_path):
    first = TensorBoard(tmp_path, clock=lambda: 100.0)
    for step in (1, 2, 3, 4):
        first(finished(step, reward=step / 8))
    first.close()
    second = TensorBoard(tmp_path, clock=lambda: 200.0)
    second(RunStarted(step=2, steps=5))
    for step in (3, 4, 5):
        second(finished(step, reward=step / 8))
    second.close()
    assert scalars(tmp_path)["train/reward"] == [(step, step / 8) for step in (1, 2, 3, 4, 5)]
