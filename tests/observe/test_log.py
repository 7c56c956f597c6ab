"""The logs of a run continue exactly, whenever it was killed."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.observe.example_events import finished, group, story
from tests.tiers import examples

from miles.core.errors import ResumeError
from miles.core.events import (
    DevicesMoved,
    EngineJoined,
    EngineLeft,
    GroupFinished,
    Progress,
    PromptAdmitted,
    RunEnded,
    RunStarted,
    Saved,
    StepFinished,
)
from miles.core.types import Version
from miles.observe.event_records import encode_line, event_record, metric_record, timing_record
from miles.observe.log import EventLog, PlainLog, RunLogs


def tell(log, events):
    for event in events:
        log(event)


def whole(folder: Path, steps: int = 6) -> bytes:
    log = EventLog(folder / "whole.jsonl", resume_at=None)
    tell(log, story(steps))
    log.close()
    return (folder / "whole.jsonl").read_bytes()


def offset_after(step: int) -> int:
    """Where the log ends when the checkpoint of ``step`` is taken: before it is announced, and before the eval."""
    events = story(step)[:-3] if step else ()
    return sum(len(encode_line(r)) for e in events if (r := event_record(e)) is not None)


def test_a_log_is_one_canonical_object_a_line(tmp_path):
    data = whole(tmp_path, steps=2)
    assert data.endswith(b"\n")
    for one in data.splitlines():
        record = json.loads(one)
        assert json.dumps(record, sort_keys=True, separators=(",", ":")).encode() == one


def test_no_wall_clock_reaches_the_event_log_or_the_metrics():
    for event in story(3):
        for record in (event_record(event), metric_record(event)):
            assert record is None or not {"seconds", "rollout", "wait", "evaluate"} & set(record)


def test_floats_read_back_to_the_same_bits_and_odd_ones_survive():
    values = {"a": 0.1 + 0.2, "b": 5e-324, "c": float("-inf"), "d": float("nan")}
    back = json.loads(encode_line(values))
    assert float(back["a"]) == values["a"] and float(back["b"]) == values["b"]
    assert float(back["c"]) == values["c"] and float(back["d"]) != float(back["d"])


def test_a_group_is_kept_as_a_summary_whose_digest_sees_every_bit():
    kept = event_record(next(e for e in story(1) if isinstance(e, GroupFinished)))
    assert kept is not None
    assert kept["group"]["rewards"] == [0.1, 0.0]
    assert kept["group"]["lengths"] == [3, 3]
    assert kept["group"]["statuses"] == ["completed", "completed"]
    assert kept["group"]["versions"] == [[0], [0]]
    from miles.observe.event_records import group_digest

    digests = {group_digest(group(1, [0.0], length=n, version=v)) for n in (3, 4) for v in (0, 1)}
    assert len(digests) == 4
    assert group_digest(group(1, [0.0])) == group_digest(group(1, [0.0]))


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_kill_point_after_the_checkpoint_gives_the_uninterrupted_log(data):
    """Cut the file at any byte the kill could have left, repeat from the checkpoint: not a byte differs."""
    step = data.draw(st.sampled_from([0, 2, 4]), label="checkpoint")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        full, start = whole(folder), offset_after(step)
        cut = data.draw(st.integers(start, len(full)), label="kill at byte")
        path = folder / "events.jsonl"
        path.write_bytes(full[:cut])
        log = EventLog(path, resume_at=start)
        tell(log, story(6, first=step + 1))
        assert log.offset() == len(full) and log.ahead() == 0
        log.close()
        assert path.read_bytes() == full


@settings(max_examples=examples(25), deadline=None)
@given(kills=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_a_run_killed_again_and_again_still_has_one_log(kills):
    """Each life starts from the newest checkpoint its log has reached, and gets further or not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        full = whole(folder)
        path, reached = folder / "events.jsonl", 0
        for kill in [*kills, 1.0]:
            step = max((s for s in (0, 2, 4) if offset_after(s) <= reached), default=0)
            log = EventLog(path, resume_at=offset_after(step) if path.exists() else None)
            tell(log, story(6, first=step + 1))
            log.close()
            reached = max(reached, int(kill * len(full)))
            path.write_bytes(path.read_bytes()[:reached])
        assert path.read_bytes() == full


def test_confirmed_lines_are_not_written_again(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(whole(tmp_path))
    log = EventLog(path, resume_at=0)
    half = story(6)[:12]
    tell(log, half)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert 0 < log.offset() < path.stat().st_size
    assert log.ahead() > 0
    log.close()


def test_a_run_that_does_not_repeat_itself_is_refused_with_line_and_both_texts(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(whole(tmp_path))
    log = EventLog(path, resume_at=offset_after(2))
    with pytest.raises(ResumeError) as caught:
        tell(log, story(6, first=3, salt=0.01))
    log.close()
    number = path.read_bytes()[: offset_after(2)].count(b"\n") + 3
    assert f"line {number}:" in str(caught.value)
    assert "before: {" in str(caught.value) and "now: {" in str(caught.value)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_without_the_promise_the_old_rest_is_set_aside_and_the_log_goes_on(tmp_path):
    path = tmp_path / "events.jsonl"
    full = whole(tmp_path)
    path.write_bytes(full)
    start = offset_after(2)
    for number, salt in ((1, 0.01), (2, 0.02)):
        before = path.read_bytes()
        log = EventLog(path, resume_at=start, strict=False)
        tell(log, story(6, first=3, salt=salt))
        log.close()
        aside = (tmp_path / "logs" / f"events-undone-{number}.jsonl").read_bytes()
        assert aside and before.endswith(aside)
        fresh = b"".join(encode_line(r) for e in story(6, first=3, salt=salt) if (r := event_record(e)) is not None)
        assert path.read_bytes() == full[:start] + fresh
    assert not list((tmp_path / "logs").glob("*.part"))


@pytest.mark.parametrize("junk", [b'{"event":"Batch', b"\0\0\0\0\n", b"[1,2]\n", b"\xff\xfe\n{}\n"])
def test_a_torn_end_is_cut(tmp_path, junk):
    path = tmp_path / "events.jsonl"
    full = whole(tmp_path)
    start = offset_after(4)
    path.write_bytes(full[:start] + junk)
    log = EventLog(path, resume_at=start)
    assert path.read_bytes() == full[:start]
    tell(log, story(6, first=5))
    log.close()
    assert path.read_bytes() == full


def test_a_log_that_does_not_fit_its_checkpoint_is_refused(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(whole(tmp_path))
    size = path.stat().st_size
    with pytest.raises(ResumeError, match="already holds a run"):
        EventLog(path, resume_at=None)
    with pytest.raises(ResumeError, match=f"has {size} bytes but"):
        EventLog(path, resume_at=size + 1)
    with pytest.raises(ResumeError, match="no line end at byte"):
        EventLog(path, resume_at=offset_after(2) - 1)
    assert path.stat().st_size == size


def test_seconds_are_cut_back_to_the_checkpoint_and_grow_again(tmp_path):
    log = PlainLog(tmp_path / "timings.jsonl", resume_at=None, encode=timing_record)
    log(finished(1))
    log.commit()
    at = log.offset()
    log(finished(2))
    log.close()
    log = PlainLog(tmp_path / "timings.jsonl", resume_at=at, encode=timing_record)
    log(StepFinished(step=2, version=Version(number=2), metrics={}, seconds={"step": 9.0}))
    log.close()
    rows = [json.loads(text) for text in (tmp_path / "timings.jsonl").read_text().splitlines()]
    assert [(row["step"], row["kind"]) for row in rows] == [(1, "train"), (2, "train")]
    assert rows[1]["step"] == 2 and rows[0]["seconds"]["rollout"] == 0.5


def test_an_interrupted_run_directory_equals_an_uninterrupted_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    with RunLogs(one, resume_at=None, strict=True, clock=lambda: 1.0) as logs:
        tell(logs, story(6))
    with RunLogs(two, resume_at=None, strict=True, clock=lambda: 2.0) as logs:
        tell(logs, story(4)[:-3])
        logs.commit()
        at = logs.offsets()
        tell(logs, story(6, first=5)[1:9])
    with RunLogs(two, resume_at=at, strict=True, clock=lambda: 3.0) as logs:
        tell(logs, story(6, first=5))
    for name in ("events.jsonl", "metrics.jsonl"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert at.keys() == {"events", "metrics", "timings"}
    sessions = [json.loads(text) for text in (two / "logs" / "sessions.jsonl").read_text().splitlines()]
    assert [s["step"] for s in sessions if s["event"] == "RunStarted"] == [0, 4]
    assert sessions[-1] == {"event": "RunEnded", "finished": True, "step": 6, "time": 3.0}


def test_a_directory_without_a_checkpoint_starts_over(tmp_path):
    with RunLogs(tmp_path, resume_at=None, strict=True, clock=float) as logs:
        tell(logs, story(6)[:9])
    with RunLogs(tmp_path, resume_at={}, strict=True, clock=float) as logs:
        tell(logs, story(6))
    with RunLogs(tmp_path / "fresh", resume_at=None, strict=True, clock=float) as logs:
        tell(logs, story(6))
    assert (tmp_path / "events.jsonl").read_bytes() == (tmp_path / "fresh" / "events.jsonl").read_bytes()


def test_lines_beyond_the_end_of_a_shortened_run_are_set_aside(tmp_path):
    with RunLogs(tmp_path, resume_at=None, strict=True, clock=float) as logs:
        tell(logs, story(6)[:-1])
    with RunLogs(tmp_path, resume_at={}, strict=True, clock=float) as logs:
        tell(logs, story(4))
    steps = [json.loads(t)["step"] for t in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 4
    assert (tmp_path / "logs" / "events-undone-1.jsonl").exists()
    assert (tmp_path / "logs" / "metrics-undone-1.jsonl").exists()


def test_live_events_are_no_part_of_what_must_repeat():
    live = [
        RunStarted(step=3, steps=9),
        PromptAdmitted(ticket=1, prompt_id=1, epoch=0),
        Progress(step=1, done=1, total=2),
        Saved(step=3, name="x", scheduled=False),
        RunEnded(step=3, finished=False),
    ]
    assert [event_record(e) for e in live] == [None] * 5 == [metric_record(e) for e in live]
    assert event_record(Saved(step=3, name="x")) == {"event": "Saved", "step": 3, "name": "x"}


CAME_AND_WENT = (
    EngineJoined(name="engine 1", address="http://a:1", version=Version(number=3)),
    DevicesMoved(step=3, ranks=1, engines=2, reason="the trainer waited"),
    EngineLeft(name="engine 0", address="http://a:0"),
)


def test_a_continued_run_need_not_have_the_engines_come_and_go_again(tmp_path):
    path, events = tmp_path / "events.jsonl", list(story(6))
    cut = len(story(2)) - 3
    lively = [*events[:cut], CAME_AND_WENT[0], *events[cut : cut + 4], *CAME_AND_WENT[1:], *events[cut + 4 :]]
    log = EventLog(path, resume_at=None)
    tell(log, lively)
    log.close()
    before = path.read_bytes()
    assert before.count(b"engine 1") == before.count(b"DevicesMoved") == 1
    log = EventLog(path, resume_at=offset_after(2))
    tell(log, events[cut : cut + 2])
    log(CAME_AND_WENT[2])  # among lines that are repeated there is no place for it
    tell(log, events[cut + 2 :])
    assert not log.ahead() and log.offset() == len(before)
    log(CAME_AND_WENT[2])
    log.close()
    assert path.read_bytes() == before + encode_line(event_record(CAME_AND_WENT[2]) or {})
