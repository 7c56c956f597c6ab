"""The trace is readable whenever the run ended, and its spans add up."""

import json
from dataclasses import replace

import pytest
from tests.observe.example_events import group
from tests.observe.trace_format import check_trace, check_trace_folder

from miles.core.events import Evaluated, GroupFinished, RunStarted, StepFinished
from miles.core.types import TimeSpan, Version
from miles.observe.dashboard.timeline import Timeline
from miles.observe.trace import GaugeSampler, LoopTrace, TraceFile


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


def test_the_device_is_handed_to_the_engines_before_an_evaluation_and_back_after_the_wait(tmp_path):
    now = iter([14.0, 20.0])
    trace = LoopTrace(tmp_path, clock=lambda: next(now))
    trace(Evaluated(step=0, metrics={}, seconds={"evaluate": 4.0}))
    seconds = {"offload": 1.5, "offload/to_rollout": 1.0, "rollout": 2.0, "offload/to_train": 0.5, "train": 3.0}
    trace(StepFinished(step=1, version=Version(), metrics={}, seconds={**seconds, "publish": 0.5, "step": 7.0}))
    trace.close()
    spans = [record for record in read(tmp_path / "loop.json") if record["ph"] == "X"]
    found = {record["name"]: (record["ts"] / 1e6, (record["ts"] + record["dur"]) / 1e6) for record in spans}
    assert found == {
        "offload/to_rollout 1": (9.0, 10.0),
        "evaluate 0": (10.0, 14.0),
        "rollout 1": (14.0, 16.0),
        "offload/to_train 1": (16.0, 16.5),
        "train 1": (16.5, 19.5),
        "publish 1": (19.5, 20.0),
    }


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


def spans_by_track(path):
    records = read(path)
    names = {r["tid"]: r["args"]["name"] for r in records if r["name"] == "thread_name"}
    found = {}
    for record in (r for r in records if r["ph"] == "X"):
        found.setdefault(names[record["tid"]], {})[record["name"]] = record
    return found


def test_every_rank_has_a_track_with_what_it_did_and_waited_for(tmp_path):
    trace = LoopTrace(tmp_path, clock=lambda: 20.0)
    trace(RunStarted(step=0, steps=1))
    spans = [TimeSpan(name="pack", start=15.0, seconds=1.0, lane="rank 0")]
    spans += [TimeSpan(name="optimize", start=16.0, seconds=1.0, lane="rank 0")]
    spans += [TimeSpan(name="optimize", start=15.0, seconds=4.0, lane="rank 1")]
    seconds = {"rollout": 5.0, "train": 4.5, "publish": 0.5, "publish/bytes": 1e9}
    trace(StepFinished(step=1, version=Version(number=1), metrics={}, seconds=seconds, spans=tuple(spans)))
    trace.close()
    tracks = spans_by_track(tmp_path / "loop.json")
    assert set(tracks) == {"loop", "rank 0", "rank 1"}
    waits = {name: r["dur"] / 1e6 for name, r in tracks["rank 0"].items() if r.get("cat") == "wait"}
    assert waits == {"wait for rollout 1": 5.0, "wait for other ranks": 2.0}
    assert "wait for other ranks" not in tracks["rank 1"]
    assert tracks["loop"]["publish 1"]["args"] == {"version": 1, "bytes": 1e9}
    assert tracks["loop"]["rollout 1"]["cat"] == "wait"


def test_groups_at_the_same_time_do_not_overlap_on_a_track(tmp_path):
    trace = LoopTrace(tmp_path, clock=lambda: 0.0)
    for ticket, started in enumerate((10.0, 10.5, 12.25)):
        one = group(ticket, [0.0, 1.0])
        times = [{"started": started, "generate": 2.0, "grade": 0.25}, {"started": started, "generate": 1.0}]
        timed = tuple(replace(t, times=each) for t, each in zip(one.trajectories, times, strict=True))
        trace(GroupFinished(ticket=ticket, kept=True, reason="", group=replace(one, trajectories=timed)))
    trace.close()
    tracks = spans_by_track(tmp_path / "groups.json")
    assert {name: sorted(spans) for name, spans in tracks.items()} == {
        "groups 1": ["generate 0", "generate 2", "grade 0", "grade 2"],
        "groups 2": ["generate 1", "grade 1"],
    }
    graded = tracks["groups 1"]["grade 0"]
    assert (graded["ts"], graded["dur"], graded["args"]["prompt"]) == (12_000_000, 250_000, 0)


def test_a_trace_beyond_its_limit_starts_anew_and_keeps_its_names(tmp_path):
    file = TraceFile(tmp_path / "engines.json", max_bytes=2000)
    file.name_track(1, "engine 0")
    for number in range(60):
        file.write_span(f"generate {number}", 1, float(number), 1.0)
    file.close()
    old, new = read(tmp_path / "engines.old.json"), read(tmp_path / "engines.json")
    assert [r["args"]["name"] for r in (old[0], new[0])] == ["engine 0"] * 2
    numbers = [int(r["name"].split()[1]) for r in (*old, *new) if r["ph"] == "X"]
    assert numbers == list(range(numbers[0], 60)) and len(new) > 1
    assert (tmp_path / "engines.json").stat().st_size < 2200


def test_gauges_are_rates_of_the_engines_counters(tmp_path):
    now, state = [100.0], {"running": 2.0, "waiting": 1.0, "pages": 8.0, "free_pages": 6.0, "steps": 0.0}
    counters = {"generated_tokens": 0.0, "cached_tokens": 0.0, "prefilled_tokens": 0.0}
    answers = [{"engine 0": {**state, **counters}}]
    sampler = GaugeSampler(
        tmp_path,
        engines=[lambda: answers[-1]],
        devices=[lambda: {"GPU 0": {"utilization": 0.5}}],
        interval=1.0,
        clock=lambda: now[0],
    )
    sampler.sample()
    changes = [{"steps": 5.0, "generated_tokens": 50.0, "cached_tokens": 3.0, "prefilled_tokens": 1.0}, {}, {}]
    for change in changes:
        now[0] += 2.0
        answers.append({"engine 0": {**answers[-1]["engine 0"], **change}})
        sampler.sample()
    sampler.close()
    records = read(tmp_path / "engines.json")
    counted = [(r["name"], r["ts"] // 10**6, r["args"]) for r in records if r["ph"] == "C"]
    requests = {"running": 2.0, "waiting": 1.0, "kv_used": 0.25}
    assert counted == [
        ("GPU 0", 100, {"utilization": 0.5}),  # written once: it does not change
        ("engine 0", 102, {**requests, "tokens_per_second": 25.0, "cache_hit": 0.75}),
        ("engine 0", 104, {**requests, "tokens_per_second": 0.0}),
    ]
    spans = spans_by_track(tmp_path / "engines.json")["engine 0"]
    assert {name: (r["ts"] // 10**6, r["dur"] // 10**6, r.get("cat")) for name, r in spans.items()} == {
        "generate": (100, 2, None),
        "wait for requests": (102, 4, "wait"),
    }


@pytest.mark.parametrize("error", [RuntimeError("changed size"), OSError("no answer"), ValueError("no JSON")])
def test_an_engine_that_cannot_be_read_is_left_out(tmp_path, error):
    def fail():
        raise error

    sampler = GaugeSampler(
        tmp_path, engines=[fail], devices=[lambda: {"GPU 0": {"watts": 5.0}}], interval=1.0, clock=lambda: 1.0
    )
    sampler.sample()
    sampler.close()
    assert [r["name"] for r in read(tmp_path / "engines.json") if r["ph"] == "C"] == ["GPU 0"]


def test_the_timeline_counts_concurrent_groups_and_shows_gauges(tmp_path):
    trace = LoopTrace(tmp_path, clock=lambda: 20.0)
    trace(StepFinished(step=1, version=Version(), metrics={}, seconds={"rollout": 10.0}))
    for ticket, started in enumerate((10.0, 11.0)):
        one = group(ticket, [1.0])
        timed = replace(one.trajectories[0], times={"started": started, "generate": 2.0, "grade": 0.5})
        trace(GroupFinished(ticket=ticket, kept=True, reason="", group=replace(one, trajectories=(timed,))))
    trace.close()
    engines = TraceFile(tmp_path / "engines.json")
    engines.write_counter("engine 0", 12.0, {"running": 3.0})
    engines.close()
    timeline = Timeline(tmp_path)
    timeline.update()
    found = timeline.read_window(0.0, 100.0)
    assert found["counters"] == {
        "engine 0: running": [[12.0, 3.0]],
        "groups in generate": [[10.0, 1.0], [11.0, 2.0], [12.0, 1.0], [13.0, 0.0]],
        "groups in grade": [[12.0, 1.0], [12.5, 0.0], [13.0, 1.0], [13.5, 0.0]],
    }
    assert found["tracks"][0]["spans"][0] == (10.0, 10.0, "rollout 1", 1, True, "")


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
