"""Metrics by column: files that grow, are truncated or damaged; downsampling that keeps extremes."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.observe.dashboard.example_runs import append_steps, write_config
from tests.tiers import examples

from miles.observe.dashboard.metric_store import MetricStore, accumulate_at, select_points, to_json_numbers


def test_lines_that_are_appended_are_read_once(tmp_path: Path):
    write_config(tmp_path)
    append_steps(tmp_path, 1, 3)
    store = MetricStore(tmp_path / "metrics.jsonl")
    assert store.update() and not store.update()
    append_steps(tmp_path, 4, 5)
    assert store.update()
    steps, values = store.series("train", "reward")
    assert steps.tolist() == [1, 2, 3, 4, 5]
    assert values.tolist() == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert store.latest_step("train") == 5


def test_half_a_line_is_read_when_it_is_complete(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"train","step":1,"loss":2.0}\n{"kind":"train","st')
    store = MetricStore(path)
    store.update()
    assert store.series("train", "loss")[0].tolist() == [1]
    with path.open("ab") as file:
        file.write(b'ep":2,"loss":"NaN"}\n')
    store.update()
    steps, values = store.series("train", "loss")
    assert steps.tolist() == [1, 2] and np.isnan(values[1])


def test_a_file_that_was_truncated_and_written_again_is_read_from_its_start(tmp_path: Path):
    write_config(tmp_path)
    append_steps(tmp_path, 1, 6)
    store = MetricStore(tmp_path / "metrics.jsonl")
    store.update()
    for name in ("metrics.jsonl", "timings.jsonl"):  # a resumed run that is at another place than before
        lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
        (tmp_path / name).write_bytes(b"".join(lines[:2]))
    append_steps(tmp_path, 3, 9, reward=7.0)
    store.update()
    steps, values = store.series("train", "reward")
    assert steps.tolist() == list(range(1, 10))
    assert values.tolist() == [0.1, 0.2] + 7 * [7.0]


def test_of_a_step_that_was_written_twice_the_later_line_counts(tmp_path: Path):
    write_config(tmp_path)
    append_steps(tmp_path, 1, 3)
    append_steps(tmp_path, 2, 2, reward=5.0)
    store = MetricStore(tmp_path / "metrics.jsonl")
    store.update()
    assert store.series("train", "reward")[1].tolist() == [0.1, 5.0, 0.3]


def test_lines_that_cannot_be_read_are_counted_and_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'garbage\n[1]\n{"kind":"train","step":1,"loss":1}\n{"kind":"train","step":"x","loss":1}\n')
    store = MetricStore(path)
    store.update()
    assert store.unreadable == 2
    assert store.series("train", "loss")[0].tolist() == [1]


def test_a_missing_file_has_no_metrics(tmp_path: Path):
    store = MetricStore(tmp_path / "metrics.jsonl")
    assert not store.update()
    assert store.names("train") == [] and store.last("train", "loss") is None


@settings(max_examples=examples(200))
@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=300),
    limit=st.integers(4, 80),
)
def test_a_downsampled_curve_keeps_its_ends_and_its_extremes(values: list[float], limit: int):
    array = np.array(values)
    chosen = select_points(array, limit)
    assert len(chosen) <= max(limit, 4)
    assert chosen[0] == 0 and chosen[-1] == len(values) - 1
    assert (np.diff(chosen) > 0).all()
    if not np.isnan(array).all():
        assert np.nanmax(array[chosen]) == np.nanmax(array)
        assert np.nanmin(array[chosen]) == np.nanmin(array)


def test_amounts_are_added_up_to_each_step():
    steps, amounts = np.array([1, 2, 4]), np.array([10.0, np.nan, 5.0])
    assert accumulate_at(steps, amounts, np.array([0, 1, 3, 4])).tolist() == [0.0, 10.0, 10.0, 15.0]
    assert accumulate_at(steps, amounts, np.array([1, 4]), inclusive=False).tolist() == [0.0, 10.0]


def test_numbers_that_json_lacks_are_null():
    assert json.dumps(to_json_numbers(np.array([1 / 3, np.nan, np.inf]), 3), allow_nan=False) == "[0.333, null, null]"
