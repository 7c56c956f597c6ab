"""Hook files written as upstream's examples are, with their imports, trained for two steps each."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path

import pytest
from tests.launch.small_run import write_inputs

from miles.launch.main import main

STYLE = "tests.hooks.upstream_style"
HELD_OUT = ("--eval-interval", "1", "--n-samples-per-eval-prompt", "2")
RUNS: dict[str, tuple[str, ...]] = {
    "retrieval": (
        *("--custom-generate-function-path", f"{STYLE}.retrieval.generate"),
        *("--custom-rm-path", f"{STYLE}.retrieval.reward_func"),
    ),
    "interpreter": (
        *("--custom-generate-function-path", f"{STYLE}.interpreter.generate"),
        *("--custom-rm-path", f"{STYLE}.interpreter.reward_func", "--reward-key", "score"),
    ),
    "async_worker": ("--rollout-function-path", f"{STYLE}.async_worker.generate_rollout_fully_async"),
    "rollout_class": ("--rollout-function-path", f"{STYLE}.rollout_class.CountingRollout", *HELD_OUT),
    "over_sampling": ("--rollout-function-path", f"{STYLE}.over_sampling.generate_rollout", *HELD_OUT),
    "one_argument": ("--custom-generate-function-path", f"{STYLE}.one_argument.generate"),
    "two_agents": ("--custom-generate-function-path", f"{STYLE}.two_agents.generate_with_agents"),
    "group_scores": (
        *("--custom-rm-path", f"{STYLE}.group_scores.rank", "--group-rm"),
        *("--custom-reward-post-process-path", f"{STYLE}.group_scores.post_process"),
        *("--dynamic-sampling-filter-path", f"{STYLE}.group_scores.keep"),
        *("--rollout-sample-filter-path", f"{STYLE}.group_scores.drop_truncated"),
        *("--rollout-all-samples-process-path", f"{STYLE}.group_scores.look"),
        *("--custom-rollout-log-function-path", f"{STYLE}.group_scores.log_rollout"),
    ),
    "loss": ("--loss-type", "custom_loss", "--custom-loss-function-path", f"{STYLE}.losses.clipped_loss"),
    "tis_and_reducer": (
        *("--use-tis", "--custom-tis-function-path", f"{STYLE}.losses.truncated"),
        *("--custom-pg-loss-reducer-function-path", f"{STYLE}.losses.get_pg_loss_reducer"),
    ),
    "short_first": (
        *("--data-source-path", f"{STYLE}.short_first.ShortFirst"),
        *("--custom-rollout-log-function-path", f"{STYLE}.short_first.log_sizes"),
    ),
    "trainer_hooks": (
        *("--custom-megatron-init-path", f"{STYLE}.trainer_hooks.init"),
        *("--custom-megatron-before-log-prob-hook-path", f"{STYLE}.trainer_hooks.before_log_prob"),
        *("--custom-megatron-before-train-step-hook-path", f"{STYLE}.trainer_hooks.before_train_step"),
        *("--custom-megatron-post-save-hook-path", f"{STYLE}.trainer_hooks.post_save"),
        *("--custom-update-weight-post-write-path", f"{STYLE}.trainer_hooks.post_write"),
    ),
    "newest_buffer": (
        *("--custom-async-data-buffer-path", f"{STYLE}.newest_buffer.NewestBuffer"),
        *("--max-weight-staleness", "1", "--reorder-window", "2"),
    ),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("style") / "world")


@pytest.fixture
def retrieval_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Documents(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
            body = json.dumps({"document": "abc" if query is not None else ""}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = HTTPServer(("127.0.0.1", 0), Documents)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("RETRIEVAL_URL", f"http://127.0.0.1:{server.server_port}/retrieve")
    yield
    server.shutdown()
    server.server_close()


def train(world: Path, run: Path, *more: str, steps: int = 2) -> list[dict]:
    """The metrics of a run."""
    line = [
        *("train", "--hf-checkpoint", str(world), "--prompt-data", str(world / "train.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--rm-type", "deterministic_random"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "4"),
        *("--num-rollout", str(steps), "--num-threads", "1", "--device", "cpu", "--view", "plain", "--lr", "1e-2"),
        *("--eval-prompt-data", "held", str(world / "heldout.jsonl"), *more),
    ]
    if "--custom-rm-path" in more:
        at = line.index("--rm-type")
        del line[at : at + 2]
    assert main(line) == 0
    return [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("retrieval_url")
@pytest.mark.parametrize("name", RUNS)
def test_a_hook_in_upstreams_style_trains_for_two_steps(world: Path, tmp_path: Path, name: str):
    rows = [row for row in train(world, tmp_path / "run", *RUNS[name]) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2] and all(row["trained_tokens"] > 0 for row in rows)
    if name == "async_worker":
        import_module(f"{STYLE}.async_worker").stop_worker()
