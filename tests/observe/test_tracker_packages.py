"""The real packages read back what a run sent to them, several at once, after a resume and after faults."""

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.observe.example_events import finished, group, taken
from tests.observe.wandb_file import read_history, read_records

from miles.core.events import Evaluated, RunStarted
from miles.observe.config import ObserveConfig
from miles.observe.factory import build_trackers
from miles.observe.opentelemetry import OtlpExporter
from miles.observe.trace import LoopTrace
from miles.observe.tracker_records import RecordBuilder, TrackerRecord
from miles.observe.trackers import TrackerIds, TrackerProcess, TrackerQueue

pytestmark = pytest.mark.trackers

OPTIONS = {"lr": 0.1, "hf_checkpoint": "model", "eval_sets": ["easy"], "load": None, "wandb_key": "***"}
KEY = "0123456789abcdef0123456789abcdef01234567"
DEADLINE = 240.0


def log_run(run: Path, first: int, last: int, **config) -> list[str]:
    """The events of a run from one step to another, to the trackers that ``config`` asks for; returns the notes."""
    run.mkdir(exist_ok=True)
    notes: list[str] = []
    observe = ObserveConfig(tracker_samples=2, tracker_samples_interval=2, **config)
    trackers = build_trackers(
        observe, run, OPTIONS, steps_per_rollout=2, note=notes.append, wall_clock=time.time, clock=lambda: 0.0
    )
    trackers(RunStarted(step=first, steps=last))
    for step in range(first + 1, last + 1):
        trackers(taken(step, [group(7, [0.0, 1.0], text="<b>|hello|</b>")]))
        trackers(finished(step, reward=step / 8, kl=math.nan, grad_norm=math.inf))
    trackers(Evaluated(step=last, metrics={"eval/easy/pass@4": 0.75}, seconds={"evaluate": 2.0}))
    trackers.close()
    assert not [note for note in notes if "not sent" in note or "failed" in note], notes
    return notes


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# -- Weights & Biases -----------------------------------------------------------------------


def test_wandb_offline_files_have_scalars_tables_and_options_and_one_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run = tmp_path / "grpo"
    for first, last in ((0, 3), (2, 5)):
        (note,) = log_run(run, first, last, use_wandb=True, wandb_mode="offline", wandb_group="g", wandb_project="p")
        assert note.startswith("Weights & Biases: wandb sync ")
    ids = json.loads((run / "trackers.json").read_text())
    assert ids["wandb_group"].startswith("g_")
    files = sorted(run.glob(f"wandb/offline-run-*-{ids['wandb_run_id']}/*.wandb"))
    assert len(files) == 2  # the second process continued the same run
    histories = [read_history(path) for path in files]
    steps = [[json.loads(row["step"]) for row in history] for history in histories]
    assert steps == [[1, 2, 3, 3], [3, 4, 5, 5]]
    assert [json.loads(row["train/reward"]) for row in histories[0][:3]] == [1 / 8, 2 / 8, 3 / 8]
    assert json.loads(histories[1][-1]["eval/easy/pass@4"]) == 0.75
    started = next(record.run for record in read_records(files[0]) if record.WhichOneof("record_type") == "run")
    assert (started.run_id, started.project, started.run_group) == (ids["wandb_run_id"], "p", ids["wandb_group"])
    options = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert options["lr"] == 0.1 and options["eval_sets"] == ["easy"]
    (table,) = files[0].parent.glob("files/media/table/samples*.json")
    saved = json.loads(table.read_text())
    assert saved["columns"][-1] == "response" and [row[-1] for row in saved["data"]] == ["<b>|hello|</b>"] * 2
    assert KEY.encode() not in b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


def test_wandb_without_its_server_holds_nothing_up(tmp_path):
    settings = {
        "team": None,
        "project": "p",
        "dir": str(tmp_path),
        "mode": "online",
        "steps_per_rollout": 1,
        "options": {},
    }
    ids = TrackerIds(tmp_path)
    ids.update({"wandb_group": "g", "wandb_run_id": "abcd1234"})
    environment = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}"}
    log_path = tmp_path / "logs" / "tracker-wandb.log"
    process = TrackerProcess("wandb", settings, ids=ids, log_path=log_path, environment=environment)
    queue = TrackerQueue(process)
    for step in range(5):
        queue.put(TrackerRecord(step=step, scalars={"train/reward": 0.5}))
    queue.finish()
    queue.join(1.0)
    assert queue.take_messages()[-1] == "wandb: 5 of 5 records were not sent."
    assert KEY not in log_path.read_text()


def test_a_process_of_a_tracker_that_is_killed_is_started_again_with_the_same_run(tmp_path):
    notes: list[str] = []
    config = ObserveConfig(use_trackio=True, trackio_dir=str(tmp_path / "db"))
    trackers = build_trackers(
        config, tmp_path, {}, steps_per_rollout=1, note=notes.append, wall_clock=time.time, clock=lambda: 0.0
    )
    log = tmp_path / "logs" / "tracker-trackio.log"
    trackers(finished(1))
    wait_for(lambda: log.exists() and "Created new run" in log.read_text())
    for pid in find_children("miles.observe.tracker_worker"):
        os.kill(pid, signal.SIGKILL)
    for step in (2, 3):
        trackers(finished(step, reward=step / 8))
    trackers.close()
    assert log.read_text().count("* Trackio project initialized") == 2
    assert sum("failed and is tried again" in note and "its process ended" in note for note in notes) == 1
    (rows,) = read_trackio(tmp_path / "db").values()
    assert [row["train/reward"] for row in rows if row["step"] > 1] == [2 / 8, 3 / 8]


def find_children(module: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            command = (path.parent / "cmdline").read_bytes().split(b"\0")
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid() and module.encode() in command:
            found.append(int(path.parent.name))
    return found


def wait_for(condition) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)


# -- Trackio --------------------------------------------------------------------------------

READ_TRACKIO = """
import json
from trackio.api import Api
from trackio.sqlite_storage import SQLiteStorage
runs = {run.name: SQLiteStorage.get_logs("miles", run.name) for run in Api().runs("miles")}
print("\\n" + json.dumps(runs))
"""


def read_trackio(folder: Path) -> dict[str, list[dict]]:
    environment = {**os.environ, "TRACKIO_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", READ_TRACKIO], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_trackio_has_every_step_in_one_run_of_its_local_database(tmp_path):
    run = tmp_path / "grpo"
    for first, last in ((0, 3), (3, 5)):
        (note,) = log_run(run, first, last, use_trackio=True, trackio_dir=str(tmp_path / "db"))
        assert "trackio show --project miles" in note
    (name,) = json.loads((run / "trackers.json").read_text()).values()
    assert name.startswith("grpo_")
    logs = read_trackio(tmp_path / "db")
    assert list(logs) == [name]
    rewards = {row["step"]: row["train/reward"] for row in logs[name] if "train/reward" in row}
    assert rewards == {step: step / 8 for step in (1, 2, 3, 4, 5)}
    assert [row["eval/easy/pass@4"] for row in logs[name] if "eval/easy/pass@4" in row] == [0.75, 0.75]
    tables = [row["samples"] for row in logs[name] if "samples" in row]
    assert len(tables) == 2 and "<b>|hello|</b>" in json.dumps(tables[0])


# -- MLflow ---------------------------------------------------------------------------------


def check_mlflow(run: Path, client) -> None:
    (experiment,) = client.search_experiments(filter_string="name = 'e'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert json.loads((run / "trackers.json").read_text()) == {"mlflow_run_id": found.info.run_id}
    assert found.info.status == "FINISHED" and found.info.run_name == "grpo"
    rewards = client.get_metric_history(found.info.run_id, "train/reward")
    assert {point.step: point.value for point in rewards} == {step: step / 8 for step in (1, 2, 3, 4, 5)}
    assert client.get_metric_history(found.info.run_id, "eval/easy.pass_at_4")[0].value == 0.75
    assert math.isnan(client.get_metric_history(found.info.run_id, "train/kl")[0].value)
    assert found.data.params["lr"] == "0.1" and "load" not in found.data.params
    assert [info.path for info in client.list_artifacts(found.info.run_id, "samples")] == [
        f"samples/step-{step:06d}.json" for step in (2, 4)
    ]


def test_mlflow_has_every_step_in_one_run_of_a_local_database(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = tmp_path / "grpo"
    for first, last in ((0, 3), (3, 5)):
        (note,) = log_run(run, first, last, use_mlflow=True, mlflow_tracking_uri=store, mlflow_experiment_name="e")
        assert note.startswith("MLflow: run ")
    client = mlflow.MlflowClient(store)
    check_mlflow(run, client)
    assert list((tmp_path / "mlartifacts").rglob("step-000002.json"))
    (found,) = client.search_runs(["1"])
    table = json.loads(Path(client.download_artifacts(found.info.run_id, "samples/step-000002.json")).read_text())
    assert table["columns"][-1] == "response" and table["data"][0][-1] == "<b>|hello|</b>"


@contextmanager
def serve_mlflow(folder: Path, port: int) -> Iterator[str]:
    """A real MLflow server."""
    words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += [
        "--backend-store-uri",
        f"sqlite:///{folder / 'server.db'}",
        "--artifacts-destination",
        str(folder / "art"),
    ]
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        wait_for(lambda: is_healthy(port) or server.poll() is not None)
        assert server.poll() is None, (folder / "server.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_an_mlflow_server_that_starts_after_the_run_gets_everything(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # where MLflow makes an empty folder mlruns
    port, run = free_port(), tmp_path / "grpo"
    run.mkdir()
    settings = {
        "tracking_uri": f"http://127.0.0.1:{port}",
        "experiment_name": "e",
        "run_name": "grpo",
        "run_id": None,
        "options": OPTIONS,
    }
    fast = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
    log_path = run / "logs" / "tracker-mlflow.log"
    process = TrackerProcess("mlflow", settings, ids=TrackerIds(run), log_path=log_path, environment=fast)
    queue = TrackerQueue(process, delay=lambda _: 1.0)
    build = RecordBuilder(max_samples=2, interval=2)
    for step in (1, 2, 3, 4, 5):
        build(taken(step, [group(7, [0.0, 1.0], text="x")]))
        queue.put(build(finished(step, reward=step / 8, kl=math.nan)))
    queue.put(build(Evaluated(step=5, metrics={"eval/easy/pass@4": 0.75})))
    messages: list[str] = []
    wait_for(lambda: messages.extend(queue.take_messages()) or messages)
    assert "tracker mlflow failed" in messages[0]
    with serve_mlflow(tmp_path, port) as url:
        wait_for(lambda: messages.extend(queue.take_messages()) or len(messages) > 1)
        queue.finish()
        queue.join(DEADLINE)
        assert messages[1:] == [f"MLflow: run {TrackerIds(run).read()['mlflow_run_id']} in {url}"]
        assert queue.take_messages() == []
        check_mlflow(run, mlflow.MlflowClient(url))


# -- OpenTelemetry --------------------------------------------------------------------------


class Receiver:
    """An OTLP receiver over HTTP, on an aiohttp server in a thread; refuses the first ``refusals`` requests."""

    def __init__(self, refusals: int = 0):
        self.spans: list = []
        self.metrics: list = []
        self.keys: list = []
        self.resources: set[tuple[str, str]] = set()
        self.refusals = refusals
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(DEADLINE)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self, started: threading.Event) -> None:
        from aiohttp import web

        async def start() -> None:
            app = web.Application()
            app.router.add_post("/v1/{kind}", self._receive)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            started.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    async def _receive(self, request):
        from aiohttp import web
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        if self.refusals:
            self.refusals -= 1
            return web.Response(status=400)
        self.keys.append(request.headers.get("authorization"))
        body = await request.read()
        if request.match_info["kind"] == "traces":
            message = ExportTraceServiceRequest.FromString(body)
            for resource in message.resource_spans:
                self._add_resource(resource)
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        else:
            message = ExportMetricsServiceRequest.FromString(body)
            for resource in message.resource_metrics:
                self._add_resource(resource)
                self.metrics += [metric for scope in resource.scope_metrics for metric in scope.metrics]
        return web.Response(body=b"", content_type="application/x-protobuf")

    def _add_resource(self, resource) -> None:
        self.resources |= {(item.key, item.value.string_value) for item in resource.resource.attributes}

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)


@pytest.fixture
def receiver():
    found = Receiver()
    yield found
    found.close()


def export_run(run: Path, url: str, steps: range, now: float) -> list[str]:
    """A run of some steps, a minute each, with its trace, exported."""
    notes: list[str] = []
    config = ObserveConfig(otlp_endpoint=url)
    trackers = build_trackers(
        config, run, {}, steps_per_rollout=1, note=notes.append, wall_clock=lambda: now, clock=lambda: 0.0
    )
    trace = LoopTrace(run / "trace", clock=lambda: now)
    seconds = {"rollout": 4.0, "train": 6.0, "train/forward": 2.0, "train/backward": 3.0, "publish": 1.0}
    done = (replace(finished(step, reward=step / 8), seconds=seconds) for step in steps)
    for event in (RunStarted(step=steps.start - 1, steps=9), *done):
        now += 60
        trace(event)
        trackers(event)
    trace.close()
    trackers.close()
    return notes


def test_an_otlp_receiver_gets_every_span_of_the_trace_once_and_every_metric(tmp_path, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    run = tmp_path / "grpo"
    run.mkdir()
    for steps, now in ((range(1, 4), 1e9), (range(3, 5), 2e9)):  # the second process repeats a step
        assert export_run(run, receiver.url, steps, now) == [f"OpenTelemetry: {receiver.url}"]
    written = [record for record in json.loads((run / "trace" / "loop.json").read_text()) if record["ph"] == "X"]
    seen = sorted((span.name, span.start_time_unix_nano // 1000) for span in receiver.spans)
    assert seen == sorted((record["name"], record["ts"]) for record in written) and len(seen) >= 15
    for span in receiver.spans:
        assert span.end_time_unix_nano >= span.start_time_unix_nano and len(span.span_id) == 8
    by_id = {span.span_id: span for span in receiver.spans}
    assert len(by_id) == len(receiver.spans)
    phases = [span for span in receiver.spans if span.name.split()[0] in ("rollout", "train", "publish")]
    assert {span.name for span in phases if not span.parent_span_id} == {span.name for span in phases}
    parts = [span for span in receiver.spans if span.parent_span_id]
    assert len(parts) == 10 and {by_id[span.parent_span_id].name.split()[0] for span in parts} == {"train"}
    assert all(by_id[span.parent_span_id].trace_id == span.trace_id for span in parts)
    rewards = [
        metric.gauge.data_points[0].as_double for metric in receiver.metrics if metric.name == "miles.train.reward"
    ]
    assert rewards == [1 / 8, 2 / 8, 3 / 8, 3 / 8, 4 / 8]
    assert {("service.name", "miles"), ("service.instance.id", "grpo")} <= receiver.resources
    assert set(receiver.keys) == {"Bearer abc"}


def test_a_receiver_that_refuses_is_tried_again_and_nothing_is_lost(tmp_path, receiver):
    receiver.refusals = 2
    trace = LoopTrace(tmp_path / "trace", clock=time.time)
    exporter = OtlpExporter(receiver.url, run_id="r", trace=tmp_path / "trace", clock=lambda: 0.0)
    queue = TrackerQueue(exporter, delay=lambda _: 0.0)
    build = RecordBuilder()
    for event in (RunStarted(step=0, steps=2), finished(1), finished(2)):
        trace(event)
        if (record := build(event)) is not None:
            queue.put(record)
    trace.close()
    wait_for(lambda: receiver.metrics)
    queue.finish()
    queue.join(DEADLINE)
    messages = queue.take_messages()
    assert sum("did not accept the export" in message for message in messages) == 1
    assert not [message for message in messages if "not sent" in message]
    assert {span.name for span in receiver.spans} >= {"rollout 1", "train 2"}
