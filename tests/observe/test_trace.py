"""The trace is readable whenever the run ended, and its spans add up."""

import json

import pytest
from tests.observe.trace_format import check_trace, check_trace_folder

from miles.core.events import Evaluated, RunStarted, StepFinished
from miles.core.types import Version
from miles.observe.trace import LoopTrace


def read(path):
    return json.loads(path.read_text())


def life(folder, *, begin, at):
    now = iter(at)
    trace = LoopTrace(folder, clock=lambda: next(now))
    trace(RunStarted(step=begin, steps=9))
    seconds = {"rollout": 2.0, "train": 3.0, "publish": 0.5, "train/pack": 1.0, "train/optimize": 2.0, "step": 5.5}
    trace(StepFinished(step=begin + 1, version=Version(), metrics={}, seconds=seconds))
    trace(Evaluated(step=begin + 1, metrics={}, seconds={"evaluate": 4.0}))
    trace.close()


def test_the_phases_of_a_step_follow_each_other_and_its_parts_lie_within(tmp_path):
    life(tmp_path, begin=0, at=[10.0, 14.0])
    spans = {record["name"]: record for record in read(tmp_path / "loop.json") if record["ph"] == "X"}
    ends = {name: (record["ts"], record["ts"] + record["dur"]) for name, record in spans.items()}
    assert ends["rollout 1"] == (4_500_000, 6_500_000)
    assert ends["train 1"] == (6_500_000, 9_500_000)
    assert ends["publish 1"] == (9_500_000, 10_000_000)
    assert ends["evaluate 1"] == (10_000_000, 14_000_000)
    assert ends["train/pack"] == (6_500_000, 7_500_000) and ends["train/optimize"] == (7_500_000, 9_500_000)


def test_a_continued_run_adds_a_life_of_its_own(tmp_path):
    life(tmp_path, begin=0, at=[10.0, 14.0])
    life(tmp_path, begin=1, at=[30.0, 34.0])
    records = read(tmp_path / "loop.json")
    assert {record["pid"] for record in records} == {1, 2}
    named = [record["args"]["name"] for record in records if record["name"] == "process_name"]
    assert named == ["session 1, from step 0", "session 2, from step 1"]


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 10, 100, 300])
def test_the_trace_of_a_killed_run_is_continued_after_its_last_complete_record(tmp_path, cut):
    life(tmp_path, begin=0, at=[10.0, 14.0])
    path = tmp_path / "loop.json"
    path.write_bytes(path.read_bytes()[: -cut or None])
    life(tmp_path, begin=1, at=[30.0, 34.0])
    records = read(path)
    assert [record["args"]["name"] for record in records if record["name"] == "process_name"][-1].endswith("step 1")


@pytest.mark.parametrize("content", [b"", b"[", b"[\n", b"[\n]\n"])
def test_an_empty_trace_is_continued(tmp_path, content):
    (tmp_path / "loop.json").write_bytes(content)
    life(tmp_path, begin=0, at=[10.0, 14.0])
    assert {record["pid"] for record in read(tmp_path / "loop.json")} == {1}


def test_a_wrong_byte_in_the_trace_does_not_end_the_run(tmp_path):
    life(tmp_path, begin=0, at=[10.0, 14.0])
    path = tmp_path / "loop.json"
    path.write_bytes(path.read_bytes().replace(b"rollout", b"roll\xffut"))
    life(tmp_path, begin=1, at=[30.0, 34.0])
    assert path.read_bytes().endswith(b"}\n]\n")


def test_a_process_that_records_nothing_leaves_an_empty_array(tmp_path):
    LoopTrace(tmp_path, clock=lambda: 0.0).close()
    assert read(tmp_path / "loop.json") == []


def test_metrics_of_speculative_decoding_are_counters_and_no_spans(tmp_path):
    trace = LoopTrace(tmp_path, clock=lambda: 8.0)
    seconds = {"rollout": 2.0, "speculative/accept_length": 2.5, "speculative/token_share": 0.75}
    trace(StepFinished(step=1, version=Version(), metrics={}, seconds=seconds))
    trace.close()
    records = read(tmp_path / "loop.json")
    counters = {record["name"]: (record["ts"], record["args"]["value"]) for record in records if record["ph"] == "C"}
    assert counters == {"speculative/accept_length": (8_000_000, 2.5), "speculative/token_share": (8_000_000, 0.75)}
    assert [record["name"] for record in records if record["ph"] == "X" and record["dur"]] == ["rollout 1"]


def test_the_trace_keeps_the_trace_event_format_also_where_times_are_rounded(tmp_path):
    now = 1.79e9
    trace = LoopTrace(tmp_path, clock=lambda: now)
    trace(RunStarted(step=0, steps=300))
    for step in range(1, 300):
        now += 3.0000001 + step / 7e6
        seconds = {
            "rollout": 1 / 3 + step / 9e6,
            "train": 2 / 3,
            "publish": step / 11e6,
            "train/a": 1 / 7,
            "train/b": 1 / 9,
        }
        seconds |= {"speculative/accept_rate": 0.5}
        trace(StepFinished(step=step, version=Version(), metrics={}, seconds=seconds))
    trace.close()
    events = check_trace_folder(tmp_path)
    assert sum(event["ph"] == "X" for event in events) == 299 * 5


@pytest.mark.parametrize(
    "event",
    [
        {"name": "a", "ph": "X", "pid": 1, "tid": 1, "ts": 5.0},
        {"name": "a", "ph": "X", "pid": 1, "tid": 1, "ts": 5.0, "dur": float("nan")},
        {"name": "a", "ph": "X", "pid": 1, "tid": 1, "ts": 9, "dur": 5},
        {"name": "a", "ph": "C", "pid": 1, "ts": 5, "args": {"value": "x"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {}},
        {"name": "a", "ph": "E", "pid": 1, "tid": 1, "ts": 5},
    ],
)
def test_the_check_of_the_format_finds_what_is_wrong(event):
    right = {"name": "b", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": 10}
    check_trace([right])
    with pytest.raises((AssertionError, KeyError)):
        check_trace([right, event])
