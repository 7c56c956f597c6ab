"""Engines join and leave a run that goes on, by ``miles engines``; what cannot be is refused in a sentence."""

import json
from pathlib import Path

import pytest
from tests.launch.small_run import Command, flags, miles, write_inputs
from tests.launch.test_server_runs import accounted
from tests.server_api.live_servers import Hosted

from miles.launch.elastic.mailbox import REQUESTS_FOLDER, Mailbox

SERVED = ("--rollout-backend", "served", "--rollout-num-engines", "1", "--max-weight-staleness", "1")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def events(run: Path, *kinds: str) -> list[dict]:
    every = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in every if event["event"] in kinds]


def listed(said: str) -> list[list[str]]:
    """The rows of the table that was printed, without its head."""
    lines = said.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("ENGINE"))
    return [line.split() for line in lines[head + 1 :] if line.strip()]


@pytest.mark.slow  # a whole run, beside which servers start and end
def test_engines_join_and_leave_while_a_run_goes_on(inputs, tmp_path):
    run = tmp_path / "run"
    going = Command("train", *flags(inputs, run, *SERVED, steps=2000))
    other = Hosted(inputs, "--incremental-streaming-output")
    url = f"http://127.0.0.1:{other.port}"
    try:
        going.wait_to_hear("step")
        first = listed(miles("engines", str(run)).stdout)
        assert [row[:2] for row in first] == [["engine", "0"]] and first[0][3] == "serving"

        joined = miles("engines", str(run), "--add", url, "--add-servers", "1")
        assert joined.returncode == 0, joined.stderr
        assert f"engine 1 at {url} has joined." in joined.stdout and "engine 2 was started at" in joined.stdout
        assert [row[3] for row in listed(joined.stdout)] == ["serving"] * 3

        wrong = miles("engines", str(run), "--add", "http://127.0.0.1:9", url, "--remove", "engine 7")
        assert wrong.returncode == 1
        assert "at http://127.0.0.1:9 does not answer" in wrong.stderr
        assert f"{url} is an engine of this run already." in wrong.stderr
        assert "engine 7 is no engine of this run" in wrong.stderr

        left = miles("engines", str(run), "--remove", first[0][2], url)
        assert left.returncode == 0, left.stderr
        assert "engine 0 has left." in left.stdout and "engine 1 has left." in left.stdout
        assert [row[:2] for row in listed(left.stdout)] == [["engine", "2"]]

        last = miles("engines", str(run), "--remove", "engine 2")
        assert last.returncode == 1 and "engine 2 is the last engine that answers" in last.stderr
    finally:
        going.interrupt()
        done = going.done()
        other.close()
    assert done.returncode == 130, done.stderr
    assert "engine 1 at" in done.stdout and "joined with version" in done.stdout
    accounted(run)
    came = events(run, "EngineJoined", "EngineLeft")
    assert [(e["event"], e["name"]) for e in came] == [
        ("EngineJoined", "engine 1"),
        ("EngineJoined", "engine 2"),
        ("EngineLeft", "engine 0"),
        ("EngineLeft", "engine 1"),
    ]
    assert all(e["version"][1] > 0 for e in came if e["event"] == "EngineJoined")
    ended = miles("engines", str(run))
    assert ended.returncode == 2 and "is not running now" in ended.stderr
    again = miles("train", *flags(inputs, run, *SERVED, steps=events(run, "StepFinished")[-1]["step"] + 2))
    assert again.returncode == 0, again.stderr
    accounted(run)


def test_what_no_engine_can_join_is_told_so(inputs, tmp_path):
    nowhere = miles("engines", str(tmp_path / "nowhere"))
    assert nowhere.returncode == 2 and "is not a run; name the directory a run was saved to" in nowhere.stderr
    run = tmp_path / "run"
    done = miles("train", *flags(inputs, run, steps=2))
    assert done.returncode == 0, done.stderr
    inside = miles("engines", str(run), "--add", "http://127.0.0.1:9")
    assert inside.returncode == 2
    assert "samples with an engine in its own process; only the engines of runs with" in inside.stderr
    written = run / "config.toml"
    written.write_text(written.read_text().replace('rollout_backend = "native"', 'rollout_backend = "served"'))
    odd = miles("engines", str(run), "--add", "nonsense://x", "--add-servers", "0")
    assert odd.returncode == 2 and "--add-servers must be at least 1, not 0." in odd.stderr
    odd = miles("engines", str(run), "--add", "nonsense://x")
    assert odd.returncode == 2 and "--add nonsense://x is not a URL" in odd.stderr
    ended = miles("engines", str(run))
    assert ended.returncode == 2 and "is not running now" in ended.stderr


@pytest.mark.parametrize(
    "words", [b"", b"\xff", b"[]", b'{"add": 3}', b'{"add": [], "add_servers": "many", "remove": []}']
)
def test_what_is_no_request_is_answered_so_and_harms_no_run(tmp_path, words):
    box = Mailbox(tmp_path)
    box.open()
    (tmp_path / REQUESTS_FOLDER / "odd.json").write_bytes(words)
    assert list(box.receive()) == []
    assert "is not a request" in (tmp_path / REQUESTS_FOLDER / "odd.answer.json").read_text()
    box.close()
