"""What a run wrote can be read back, even after an accident."""

import math

import pytest
from tests.observe.example_events import story

from miles.core.errors import DataError
from miles.observe.event_records import encode_line, metric_record, timing_record
from miles.observe.log_reader import read_rows


def test_what_was_written_is_read_back_exactly(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(encode_line(r) for e in story(4) if (r := metric_record(e)) is not None))
    rows = read_rows(path)
    assert rows.unreadable == ()
    assert rows.series("train", "reward") == ([1, 2, 3, 4], [0.1, 0.2, 0.1 * 3, 0.4])
    assert rows.series("eval", "eval/easy/reward")[0] == [0, 2, 4]
    assert rows.series("train", "odd")[1] == [math.inf] * 4
    assert "kind" not in rows.names("train") and rows.series("train", "absent") == ([], [])


def test_damaged_lines_are_counted_and_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = encode_line({"kind": "train", "step": 1, "reward": 0.5})
    bad = [
        b"{torn",
        b"\0\0\0",
        b"\xff\xfe",
        b"[]",
        b'{"kind":"train"}',
        b'{"kind":"train","step":2,"reward":null}',
        b"",
    ]
    path.write_bytes(
        good + b"\n".join(bad) + b"\n" + encode_line({"kind": "train", "step": 3, "reward": "NaN"}) + b'{"kind":"tr'
    )
    rows = read_rows(path)
    assert [row.step for row in rows.rows] == [1, 3] and math.isnan(rows.rows[1].values["reward"])
    assert rows.unreadable == (2, 3, 4, 5, 6, 7, 10)


def test_a_step_written_twice_counts_once_and_the_later_one_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b"".join(encode_line({"kind": "train", "step": s, "reward": r}) for s, r in ((1, 0.1), (2, 0.2), (1, 0.9)))
    )
    assert read_rows(path).series("train", "reward") == ([1, 2], [0.9, 0.2])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        read_rows(tmp_path / "nowhere.jsonl")


def test_seconds_are_read_from_their_own_object(tmp_path):
    path, torn = tmp_path / "timings.jsonl", b'{"kind":"train","step":3,"seconds":1}'
    path.write_bytes(b"".join(encode_line(r) for e in story(2) if (r := timing_record(e)) is not None) + torn)
    rows = read_rows(path)
    assert rows.series("train", "step") == ([1, 2], [1.0, 1.0]) and rows.series("eval", "evaluate")[1] == [0.5, 0.5]
    assert [row.step for row in rows.select("group")] == [2, 3, 4, 5] and len(rows.unreadable) == 1
