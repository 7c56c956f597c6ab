"""Queries of the dashboard on runs written by the real sinks: numbers, filters, faults, nothing outside of a run."""

import json
from pathlib import Path

import pytest
from tests.observe.dashboard.example_runs import (
    HOSTILE,
    append_steps,
    build_example_api,
    text_group,
    write_config,
    write_long_run,
    write_rollouts,
    write_run,
)
from tests.observe.example_events import finished

from miles.core.errors import UsageError
from miles.observe.dashboard.api import QueryError, format_query
from miles.observe.dashboard.run_index import RunIndex, find_runs
from miles.observe.dashboard.timeline import Timeline, read_trace
from miles.observe.log import encode_line
from miles.observe.log_reader import read_rows
from miles.observe.trace import LoopTrace


def ask(api, query: str, /, **params):
    """Query with plain values, and check that the answer is strict JSON."""
    values = {key: value if isinstance(value, list) else [value] for key, value in params.items()}
    answer = api.query(query, {key: list(map(str, value)) for key, value in values.items()})
    json.dumps(answer, allow_nan=False)
    return answer


# -- runs and series ------------------------------------------------------------------------


def test_runs_are_found_below_a_folder_and_links_are_not_followed(tmp_path: Path):
    write_run(tmp_path / "a" / "one")
    write_run(tmp_path / "two")
    write_run(tmp_path / "two" / "checkpoints" / "not-a-run")
    outside = write_run(tmp_path.parent / f"{tmp_path.name}-outside")
    (tmp_path / "link").symlink_to(outside)
    assert [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)] == ["a/one", "two"]


def test_a_run_that_appears_later_is_listed(tmp_path: Path):
    write_run(tmp_path / "one")
    api = build_example_api(tmp_path)
    write_run(tmp_path / "two", is_finished=False)
    found = {run["name"]: run["status"] for run in ask(api, "runs")["runs"]}
    assert found == {"one": "finished", "two": "running"}


def test_a_run_that_has_written_nothing_for_long_is_silent(tmp_path: Path):
    write_run(tmp_path / "one", is_finished=False)
    assert ask(build_example_api(tmp_path, now=10.0**12), "runs")["runs"][0]["status"] == "silent"


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="is not a folder"):
        RunIndex([tmp_path / "nothing"])


def test_series_are_those_of_the_log(tmp_path: Path):
    folder = write_run(tmp_path / "one", steps=6)
    api = build_example_api(tmp_path)
    rows = read_rows(folder / "metrics.jsonl")
    for name, kind in (("reward", "train"), ("eval/easy/reward", "eval"), ("lr", "train")):
        (series,) = ask(api, "series", run="one", name=name)["series"]
        steps, values = rows.series(kind, name)
        assert series["step"] == steps
        assert series["y"] == pytest.approx(values)


def test_tokens_and_hours_are_added_up(tmp_path: Path):
    write_config(tmp_path / "one")
    append_steps(tmp_path / "one", 1, 3)
    (series,) = ask(build_example_api(tmp_path), "series", run="one", name="reward")["series"]
    assert series["tokens"] == [100.0, 200.0, 300.0]
    assert series["hours"] == pytest.approx([1 / 3600, 2 / 3600, 3 / 3600])


def test_new_points_alone_are_sent_since_a_step(tmp_path: Path):
    write_config(tmp_path / "one")
    append_steps(tmp_path / "one", 1, 5)
    api = build_example_api(tmp_path)
    before = ask(api, "state", run="one")["runs"]["one"]
    assert ask(api, "state", run="one")["runs"]["one"] == before
    append_steps(tmp_path / "one", 6, 7)
    assert ask(api, "state", run="one")["runs"]["one"] != before
    (series,) = ask(api, "series", run="one", name="reward", since=5)["series"]
    assert series["step"] == [6, 7] and series["last_step"] == 7


def test_a_long_run_is_sent_in_few_points_with_its_extremes(tmp_path: Path):
    write_long_run(tmp_path / "long", 3000, metrics=3)
    (series,) = ask(build_example_api(tmp_path), "series", run="long", name="spike", points=200)["series"]
    assert series["total"] == 3000 and len(series["step"]) <= 200
    assert series["step"][series["y"].index(9.0)] == 1000


def test_smoothing_is_computed_over_all_steps_not_over_the_points_sent(tmp_path: Path):
    from miles.observe.plots import smooth

    folder = write_long_run(tmp_path / "long", 1000, metrics=0)
    (series,) = ask(build_example_api(tmp_path), "series", run="long", name="reward", smooth=20, points=50)["series"]
    expected = dict(enumerate(smooth(read_rows(folder / "metrics.jsonl").series("train", "reward")[1], 20), 1))
    assert series["smooth"] == pytest.approx([expected[step] for step in series["step"]], rel=1e-5)


def test_the_difference_of_two_configs_names_what_differs(tmp_path: Path):
    write_run(tmp_path / "one", options="lr = 0.001\nseed = 1")
    write_run(tmp_path / "two", options='lr = 0.01\nseed = 1\nsave = "x"')
    found = ask(build_example_api(tmp_path), "config", run=["one", "two"])["difference"]
    assert found == [["lr", 0.001, 0.01], ["save", None, "x"]]


def test_the_time_of_a_step_is_split_into_its_phases(tmp_path: Path):
    write_config(tmp_path / "one")
    append_steps(tmp_path / "one", 1, 10)
    found = ask(build_example_api(tmp_path), "time", run="one")
    shares = {phase["name"]: phase["share"] for phase in found["phases"]}
    assert found["seconds_per_step"] == pytest.approx(1.0)
    assert shares == pytest.approx({"rollout": 0.5, "offload": 0.0, "train": 0.4, "publish": 0.1, "other": 0.0})
    assert found["rates"]["rollout"] == pytest.approx(200.0)
    assert found["limit"]["seconds"] is None and "no limits.json" in found["limit"]["why"]


def test_long_hand_overs_of_the_device_are_a_phase_with_parts_and_advice(tmp_path: Path):
    write_config(tmp_path / "one")
    parts = {"offload/to_rollout": 0.3, "offload/to_train": 0.1}
    seconds = {"rollout": 0.3, "offload": 0.4, **parts, "train": 0.2, "publish": 0.1, "step": 1.0}
    with (tmp_path / "one" / "timings.jsonl").open("ab") as timings:
        timings.write(encode_line({"kind": "train", "step": 1, "seconds": seconds}))
    found = ask(build_example_api(tmp_path), "time", run="one")
    (phase,) = [phase for phase in found["phases"] if phase["name"] == "offload"]
    assert phase["share"] == pytest.approx(0.4) and found["phases"][-1] == {
        "name": "other",
        "seconds": pytest.approx(0.0),
        "parts": [],
        "share": pytest.approx(0.0),
        "of_limit": None,
    }
    assert {part["name"]: part["seconds"] for part in phase["parts"]} == pytest.approx(parts)
    assert any("--engine-memory-fraction" in advice["text"] for advice in found["advice"])


def write_limits(folder: Path, **changes) -> None:
    parts = {"rollout/decode": "rollout", "train/forward_backward": "train/optimize", "publish/weights": "publish"}
    rows = [{"name": name, "inside": inside, "seconds": 9.0, "why": ""} for name, inside in parts.items()]
    rows[2] |= {"seconds": None, "why": "the way is not known"}
    stored = {"device": {"name": "H200", "source": "data sheet"}, "workload": "w", "parts": rows, "seconds": 18.0}
    (folder / "limits.json").write_text(json.dumps(stored | changes))


def append_limits(folder: Path, limits: list[dict[str, float]]) -> None:
    with (folder / "timings.jsonl").open("ab") as timings:
        for step, limit in enumerate(limits, 1):
            seconds = {"rollout": 0.5, "train": 0.4, "publish": 0.1, "step": 1.0, "train/optimize": 0.3, **limit}
            timings.write(encode_line({"kind": "train", "step": step, "seconds": seconds}))


def test_the_time_of_a_step_is_held_against_its_limit_by_cause(tmp_path: Path):
    write_config(tmp_path / "one")
    decode, train = "limit/rollout/decode", "limit/train/forward_backward"
    # one step's decoding is bounded by memory, the other's by compute: its mean is over both
    limits = [{f"{decode}/memory": 0.2, f"{train}/compute": 0.1}, {f"{decode}/compute": 0.1, f"{train}/compute": 0.1}]
    append_limits(tmp_path / "one", limits)
    write_limits(tmp_path / "one")
    found = ask(build_example_api(tmp_path), "time", run="one")
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert phases["rollout"]["limit"] == pytest.approx(0.15) and phases["rollout"]["of_limit"] == pytest.approx(0.3)
    assert phases["train"]["of_limit"] == pytest.approx(0.25) and phases["publish"]["limit"] is None
    (optimize,) = phases["train"]["parts"]
    assert optimize["limit"] == pytest.approx(0.1) and optimize["of_limit"] == pytest.approx(1 / 3)
    assert phases["publish"]["unknown"] == [{"name": "publish/weights", "why": "the way is not known"}]
    assert found["limit"]["seconds"] == pytest.approx(0.25) and found["limit"]["planned"] == 18.0
    causes = {(each["phase"], each["cause"]): each["seconds"] for each in found["limit"]["causes"]}
    assert causes == pytest.approx(
        {
            ("rollout", "memory"): 0.1,
            ("rollout", "compute"): 0.05,
            ("rollout", "beyond"): 0.35,
            ("train", "compute"): 0.1,
            ("train", "beyond"): 0.3,
            ("publish", "no limit known"): 0.1,
            ("offload", "no limit known"): 0.0,
            ("other", "no limit known"): 0.0,
        }
    )


def test_generation_that_overlaps_is_held_against_the_whole_step(tmp_path: Path):
    write_config(tmp_path / "one")
    limit = {"limit/rollout/decode/memory": 0.8, "limit/train/forward_backward/compute": 0.1}
    append_limits(tmp_path / "one", [limit])
    write_limits(tmp_path / "one", overlaps=True, concurrent=True)
    found = ask(build_example_api(tmp_path), "time", run="one")
    rollout = found["phases"][0]
    assert rollout["of_limit"] == pytest.approx(0.8) and found["limit"]["seconds"] == pytest.approx(0.8)
    assert found["limit"]["causes"][0] == {"phase": "rollout", "cause": "waiting", "seconds": pytest.approx(0.5)}


def test_a_damaged_file_of_limits_is_no_limit(tmp_path: Path):
    write_config(tmp_path / "one")
    append_steps(tmp_path / "one", 1, 2)
    for text in ("", "[]", '{"parts": 3}'):
        (tmp_path / "one" / "limits.json").write_text(text)
        assert ask(build_example_api(tmp_path), "time", run="one")["limit"]["seconds"] is None


def test_the_timeline_has_the_spans_of_the_trace(tmp_path: Path):
    folder = write_run(tmp_path / "one", steps=3)
    spans = [record for record in read_trace(folder / "trace" / "loop.json")[0] if record["ph"] == "X"]
    found = ask(build_example_api(tmp_path), "timeline", run="one", start=0, end=10**6)
    shown = [span for track in found["tracks"] for span in track["spans"]]
    assert sorted(span[2] for span in shown) == sorted(span["name"] for span in spans)
    assert [track["name"] for track in found["tracks"]] == ["loop"]


def test_the_timeline_follows_a_trace_that_grows_is_closed_and_is_continued(tmp_path: Path):
    folder = write_run(tmp_path / "one", steps=1)
    ticks = iter(range(100, 10**6))
    timeline = Timeline(folder / "trace")
    for step in (2, 3, 4):
        trace = LoopTrace(folder / "trace", clock=lambda: float(next(ticks)))
        trace(finished(step))
        trace.commit()
        timeline.update()
        trace.close()
        timeline.update()
    fresh = Timeline(folder / "trace")
    fresh.update()
    whole = fresh.read_window(0.0, 1e9)
    assert timeline.read_window(0.0, 1e9) == whole
    names = [span[2] for track in whole["tracks"] for span in track["spans"]]
    assert [f"train {step}" in names for step in (1, 2, 3, 4)] == [True] * 4


# -- reading --------------------------------------------------------------------------------


@pytest.fixture
def readable(tmp_path: Path):
    write_run(tmp_path / "one", steps=2)
    groups = [
        text_group("say seven", [("seven", 1.0), ("eight", 0.0), (HOSTILE, 0.5)], prompt_id=5),
        text_group("say nine", [("nine nine", 0.25)], prompt_id=6, tool_calls=2),
    ]
    write_rollouts(tmp_path / "one", 3, groups)
    return build_example_api(tmp_path)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"sort": "reward", "order": "desc"}, [0, 2, 3, 1]),
        ({"sort": "length"}, [0, 1, 3, 2]),
        ({"status": "truncated"}, [1]),
        ({"min_reward": 0.25, "max_reward": 0.5}, [2, 3]),
        ({"min_length": 6}, [2, 3]),
        ({"q": "SEVEN"}, [0, 1, 2]),
        ({"q": "ight"}, [1]),
        ({"tools": 1}, [3]),
        ({"advantage": "negative"}, [0, 3]),
        ({"group": 1}, [3]),
        ({"limit": 2, "offset": 1}, [1, 2]),
    ],
)
def test_trajectories_are_filtered_and_sorted(readable, filters: dict, expected: list[int]):
    found = ask(readable, "trajectories", run="one", step=3, **filters)
    assert [row["index"] for row in found["rows"]] == expected
    assert found["total"] == 4


def test_all_steps_are_searched_for_a_text_the_newest_first(readable):
    found = ask(readable, "trajectories", run="one", step="all", q="nine nine")
    assert [(row["step"], row["index"]) for row in found["rows"]] == [(3, 3)]
    assert found["searched"] == found["steps"] == 3


def test_a_trajectory_is_a_conversation_with_its_text_as_it_was_sampled(readable):
    found = ask(readable, "trajectory", run="one", step=3, index=2)
    assert found["messages"] == [{"role": "user", "content": "say seven"}]
    assert [span["author"] for span in found["branches"][0]["spans"]] == ["prompt", "policy"]
    assert found["branches"][0]["spans"][1]["text"] == HOSTILE
    assert (found["reward"], found["label"], found["group_size"]) == (0.5, "42", 3)


def test_tokens_have_their_text_and_every_number_of_the_file(readable):
    found = ask(readable, "tokens", run="one", step=3, index=0)
    prompt, policy = found["spans"]
    assert "".join(prompt["texts"]) == "say seven" and "".join(policy["texts"]) == "seven"
    assert policy["values"]["logprob"] == pytest.approx([-0.1, -0.575, -1.05, -1.525, -2.0])
    assert policy["values"]["engine_trainer_difference"] == pytest.approx([0.25] * 5)
    assert policy["values"]["advantage"] == [-0.5] * 5
    assert policy["version"] == 3 and prompt["values"] == {}
    assert policy["values"]["entropy"] == pytest.approx([-each for each in policy["values"]["trainer_logprob"]])
    assert found["expert_layers"] == 2 and policy["experts"] == [[ord(char) % 5] for char in "seven"]
    other = ask(readable, "tokens", run="one", step=3, index=0, layer=1)["spans"][1]
    assert other["experts"] == [[ord(char) % 3] for char in "seven"]


def test_the_slowest_trajectories_are_found_by_their_seconds(readable):
    found = ask(readable, "trajectories", run="one", step=3, sort="generate_seconds", order="desc")["rows"]
    assert [row["index"] for row in found[:2]] == [2, 3] and found[0]["generate_seconds"] == len(HOSTILE)
    assert ask(readable, "trajectories", run="one", step=3, sort="grade_seconds", order="desc")["rows"][0]["index"] == 2


def test_tokens_come_in_pages_that_add_up(readable):
    whole = ask(readable, "tokens", run="one", step=3, index=2)
    starts = range(0, whole["total"], 7)
    pages = [ask(readable, "tokens", run="one", step=3, index=2, first=first, limit=7) for first in starts]
    texts = ["".join("".join(span["texts"]) for span in page["spans"]) for page in pages]
    assert "".join(texts) == "say seven" + HOSTILE


def test_without_a_tokenizer_tokens_are_numbers_and_the_reason_is_given(readable, tmp_path: Path):
    def fail(run: Path):
        raise UsageError("There is no tokenizer in model.")

    api = build_example_api(tmp_path)
    api._load_tokenizer = fail
    found = ask(api, "trajectory", run="one", step=3, index=0)
    assert found["branches"][0]["spans"][1]["text"].startswith("[115][101]")
    assert "There is no tokenizer in model." in found["tokenizer_error"]


def test_a_damaged_rollout_file_is_an_error_that_names_it(readable, tmp_path: Path):
    (tmp_path / "one" / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(QueryError, match=r"step-000002\.parquet cannot be read") as caught:
        ask(readable, "trajectories", run="one", step=2)
    assert caught.value.status == 422


# -- nothing outside of a run ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "params"),
    [
        ("overview", {"run": "../secret"}),
        ("overview", {"run": "/etc"}),
        ("overview", {"run": ".."}),
        ("log", {"run": "one", "name": "../config.toml"}),
        ("log", {"run": "one", "name": "/etc/passwd"}),
        ("log", {"run": "one", "name": "sessions.jsonl"}),
        ("trajectories", {"run": "one", "step": "../../x"}),
        ("trajectories", {"run": "one", "step": 77}),
        ("docs", {"page": "../secret.md"}),
        ("docs", {"page": "/etc/passwd"}),
        ("nothing", {}),
    ],
)
def test_no_path_leads_out_of_a_run(tmp_path: Path, query: str, params: dict):
    write_run(tmp_path / "runs" / "one")
    write_run(tmp_path / "secret")
    (tmp_path / "secret.md").write_text("secret")
    (tmp_path / "docs").mkdir()
    with pytest.raises(QueryError) as caught:
        ask(build_example_api(tmp_path / "runs", docs=tmp_path / "docs"), query, **params)
    assert caught.value.status in (400, 404)


@pytest.mark.parametrize("source", ["../config", "*", "a" * 63, "A" * 64, "../" + "a" * 61])
def test_images_are_found_by_their_hash_alone(tmp_path: Path, source: str):
    write_run(tmp_path / "one")
    with pytest.raises(QueryError, match="no such image"):
        build_example_api(tmp_path).find_image({"run": ["one"], "source": [source]})


@pytest.mark.parametrize(
    "params", [{"points": "x"}, {"points": -1}, {"points": 10**9}, {"since": 10**30}, {"smooth": "1e3"}]
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, params: dict):
    write_run(tmp_path / "one")
    with pytest.raises(QueryError) as caught:
        ask(build_example_api(tmp_path), "series", run="one", name="reward", **params)
    assert caught.value.status == 400


def test_a_query_is_spelled_in_one_way():
    assert format_query("series", {"run": ["b c", "é"], "name": ["x/y"]}) == "series?name=x%2Fy&run=b%20c&run=%C3%A9"
