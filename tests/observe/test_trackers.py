"""Trackers beside a run: one that is down, slow or broken neither delays nor ends it, and what it missed is counted."""

import json
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.observe.example_events import finished, group, taken

from miles.core.events import Evaluated, RunStarted
from miles.observe.config import ObserveConfig
from miles.observe.factory import build_trackers
from miles.observe.prometheus import PrometheusEndpoint
from miles.observe.tracker_records import (
    MAX_SAMPLE_CHARS,
    SAMPLE_COLUMNS,
    RecordBuilder,
    TrackerRecord,
    decode_record,
    encode_record,
    format_messages,
)
from miles.observe.trackers import TrackerIds, TrackerQueue, Trackers

DEADLINE = 60.0


class Recorder:
    """A tracker that keeps records, after raising ``failures`` times, and once ``gate`` is open."""

    name = "recorder"

    def __init__(self, *, failures: int = 0, open_failures: int = 0, gate: threading.Event | None = None):
        self.failures = failures
        self.open_failures = open_failures
        self.gate = gate
        self.waiting = threading.Event()
        self.steps: list[int] = []
        self.opened = self.closed = 0

    def open(self) -> str:
        if self.open_failures:
            self.open_failures -= 1
            raise ConnectionError("no server at https://me:hunter22@host")
        self.opened += 1
        return "Recorder: here"

    def log(self, record: TrackerRecord) -> None:
        self.waiting.set()
        if self.gate is not None:
            assert self.gate.wait(DEADLINE)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("it is down")
        self.steps.append(record.step)

    def close(self) -> None:
        self.closed += 1

    def kill(self) -> None:
        if self.gate is not None:
            self.gate.set()


def record(step: int) -> TrackerRecord:
    return TrackerRecord(step=step, scalars={"train/reward": step / 8})


def end(queue: TrackerQueue) -> list[str]:
    queue.finish()
    queue.join(DEADLINE)
    return queue.take_messages()


def test_records_arrive_in_order_and_the_tracker_is_closed():
    tracker = Recorder()
    queue = TrackerQueue(tracker)
    for step in range(50):
        queue.put(record(step))
    assert end(queue) == ["Recorder: here"]
    assert tracker.steps == list(range(50)) and tracker.closed == 1


def test_a_tracker_that_fails_now_and_then_gets_every_record_and_warns_once():
    tracker = Recorder(failures=2, open_failures=1)
    queue = TrackerQueue(tracker, delay=lambda _: 0.0)
    for step in range(5):
        queue.put(record(step))
    while not tracker.steps:
        tracker.waiting.wait(DEADLINE)
    warning, where = end(queue)
    assert "tracker recorder failed" in warning and "the run goes on" in warning and where == "Recorder: here"
    assert "hunter22" not in warning
    assert tracker.steps == list(range(5)) and tracker.opened == 1


def test_a_tracker_that_always_fails_ends_at_once_and_what_it_missed_is_counted():
    tracker = Recorder(failures=10**6)
    queue = TrackerQueue(tracker)  # the pause after a failure ends when the run does
    for step in range(7):
        queue.put(record(step))
    assert tracker.waiting.wait(DEADLINE)
    _, warning, missed = end(queue)
    assert "it is down" in warning and missed == "recorder: 7 of 7 records were not sent."


def test_a_tracker_that_hangs_does_not_hold_up_the_run_and_is_ended():
    tracker = Recorder(gate=threading.Event(), failures=1)
    queue = TrackerQueue(tracker, capacity=3)
    queue.put(record(0))
    assert tracker.waiting.wait(DEADLINE)
    for step in range(1, 10):
        queue.put(record(step))  # returns although nothing was taken
    queue.finish()
    queue.join(0.0)
    where, slow, missed = queue.take_messages()
    assert where == "Recorder: here" and "3 records wait for it" in slow
    assert missed == "recorder: 10 of 10 records were not sent." and tracker.steps == []


def test_a_record_that_is_refused_again_and_again_is_left_out():
    class Picky(Recorder):
        def log(self, record: TrackerRecord) -> None:
            if record.step == 1:
                raise ValueError("bad name")
            super().log(record)

    tracker = Picky()
    queue = TrackerQueue(tracker, delay=lambda _: 0.0)
    for step in range(4):
        queue.put(record(step))
    while len(tracker.steps) < 3:
        tracker.waiting.wait(0.01)
    assert end(queue)[-1] == "recorder: 1 of 4 records were not sent."
    assert tracker.steps == [0, 2, 3]


def test_all_trackers_share_one_deadline():
    stuck = [Recorder(gate=threading.Event()) for _ in range(3)]
    notes: list[str] = []
    times = iter([0.0, 0.0, 100.0, 100.0])
    trackers = Trackers(stuck, RecordBuilder(), note=notes.append, clock=lambda: next(times))
    trackers(finished(1))
    for tracker in stuck:
        assert tracker.waiting.wait(DEADLINE)
    stuck[0].gate.set()
    trackers.close()
    assert stuck[0].steps == [1] and stuck[0].closed == 1
    assert sum("Recorder: here" in note for note in notes) == 3


# -- records --------------------------------------------------------------------------------


def test_a_record_survives_the_way_to_another_process():
    build = RecordBuilder(max_samples=1)
    build(taken(4, [group(7, [0.5], text="answer")]))
    made = build(finished(4, reward=float("inf")))
    assert made is not None
    line = encode_record(made)
    assert "\n" not in line and decode_record(line) == made
    assert made.samples[0][SAMPLE_COLUMNS.index("response")] == "answer"
    resumed = RecordBuilder()(RunStarted(step=3, steps=9))
    assert resumed is not None and decode_record(encode_record(resumed)) == TrackerRecord(step=3, is_resume=True)


def test_tables_of_samples_are_capped_in_rows_text_and_steps():
    build = RecordBuilder(max_samples=3, interval=2)
    tables = []
    for step in (1, 2, 3):
        build(taken(step, [group(number, [0.0, 1.0], text=f"{number}" * 9000) for number in range(6)]))
        made = build(finished(step))
        assert made is not None
        tables.append(made.samples)
    assert [len(table) for table in tables] == [0, 3, 0]
    rows = [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in tables[1]]
    assert [row["prompt_id"] for row in rows] == [0, 2, 4] and rows[0]["reward"] == 0.0
    assert all(len(row["response"]) < MAX_SAMPLE_CHARS + 60 and "5000 characters" in row["response"] for row in rows)


def test_a_prompt_of_messages_and_images_is_readable():
    image = {"role": "user", "content": [{"type": "image", "image": b"x"}, {"type": "text", "text": "What?"}]}
    assert format_messages([{"role": "system", "content": "Be brief."}, image]) == (
        "system: Be brief.\n\nuser: [image] What?"
    )


def test_ids_of_several_trackers_are_kept_together(tmp_path):
    ids = TrackerIds(tmp_path)
    assert ids.read() == {}
    threads = [threading.Thread(target=ids.update, args=({f"id{number}": "x"},)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(json.loads((tmp_path / "trackers.json").read_text())) == {f"id{number}" for number in range(8)}


# -- Prometheus -----------------------------------------------------------------------------


def fetch(url: str, token: str | None = None) -> str:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=DEADLINE) as answer:
        return answer.read().decode()


def parse(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels == {"run_name": "grpo"}
    }


@pytest.fixture
def endpoint():
    found = PrometheusEndpoint("127.0.0.1", 0, run_name="grpo")
    found.open()
    yield found
    found.close()


def test_prometheus_reads_the_newest_value_of_every_metric(endpoint):
    build = RecordBuilder()
    held_out = Evaluated(step=2, metrics={"eval/easy/pass@4": 0.75}, seconds={"evaluate": 2.0})
    for event in (finished(1, reward=0.25), finished(2, reward=0.5, kl=float("nan")), held_out):
        endpoint.log(build(event))
    text = fetch(endpoint.address)
    values = parse(text)
    assert values["miles_train_reward"] == 0.5 and values["miles_step"] == 2
    assert values["miles_eval_easy_pass_at_4"] == 0.75 and values["miles_seconds_evaluate"] == 2.0
    assert values["miles_train_kl"] != values["miles_train_kl"]
    assert "# HELP miles_train_reward train/reward: Mean reward of the trajectories" in text


def test_only_the_metrics_are_served_and_only_with_the_token():
    found = PrometheusEndpoint("127.0.0.1", 0, run_name="grpo", token="right-token")
    found.open()
    try:
        for url, token, status in (
            (found.address, None, 401),
            (found.address, "wrong-token", 401),
            (found.address.replace("/metrics", "/../config.toml"), "right-token", 404),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                fetch(url, token)
            assert error.value.code == status
        found.log(record(3))
        assert parse(fetch(found.address, "right-token"))["miles_step"] == 3
    finally:
        found.close()


def test_a_port_that_is_taken_is_reported_and_the_run_goes_on(endpoint, tmp_path):
    port = int(endpoint.address.split(":")[2].split("/")[0])
    notes: list[str] = []
    config = ObserveConfig(metrics_port=port, use_tensorboard=True)
    trackers = build_trackers(
        config,
        tmp_path,
        {},
        steps_per_rollout=1,
        note=notes.append,
        wall_clock=lambda: 100.0,
        clock=lambda: 0.0,
    )
    trackers(finished(1))
    trackers.close()
    assert any("tracker prometheus failed" in note and "in use" in note for note in notes)
    assert "prometheus: 1 of 1 records were not sent." in notes
    assert list((tmp_path / "tensorboard").iterdir())
