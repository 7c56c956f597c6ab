"""``miles serve`` as a user types it: what it takes, what it refuses, and how it comes and goes."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.backends.native.server.tiny import write_model

from miles.core.errors import UsageError
from miles.launch.commands.serve import read_serve_config, serve
from miles.launch.main import main
from miles.launch.runtime.http_service import find_key_problem, read_key

HEAVY = ("torch", "numpy", "transformers", "aiohttp", "safetensors", "llguidance", "prometheus_client", "uvloop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(Path(tmp_path_factory.mktemp("tiny")))


def complaints(line: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["serve", *line]) == 2
    return [output.removeprefix("miles: ") for output in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize("line", [["--help"], [], ["nowhere"], ["--prot", "3"]])
def test_help_and_complaints_load_nothing_heavy(line: list[str]):
    code = (
        f"import sys; from miles.launch.main import main; main(['serve', *{line!r}])\n"
        f"found = set({HEAVY!r}) & set(sys.modules)\n"
        "sys.exit(f'loaded {found}' if found else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_everything_wrong_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    reported = complaints([str(tmp_path / "none"), "--port", "70000", "--drain-seconds", "-1", "--prot", "1"], capsys)
    assert reported == [
        "--prot is not a flag; did you mean --port?",
        "--port must be at least 0 and at most 65535, not 70000.",
        "--drain-seconds must be at least 0, not -1.",
        f"{tmp_path / 'none'} does not exist; name the folder of a Hugging Face checkpoint, or hf://ORG/NAME.",
    ]
    (reported,) = complaints([], capsys)
    assert reported.startswith("The model is missing")
    (reported, *_) = complaints(["a", "b"], capsys)
    assert reported == "miles serve takes one model, but was given 2: a b."


def test_training_is_refused_where_it_does_not_work(folder: Path, capsys: pytest.CaptureFixture[str]):
    reported = complaints([str(folder), "--train", "--enable-lora", "--tensor-parallel-size", "2"], capsys)
    assert reported == [
        "--train does not go together with --enable-lora, which is implied; remove it.",
        "--train does not go together with --tensor-parallel-size; remove it.",
    ]
    (reported,) = complaints([str(folder), "--service-tenants", "tenants.toml"], capsys)
    assert reported.endswith("add --train.")


def test_a_run_is_served_from_its_newest_checkpoint(folder: Path, tmp_path: Path):
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "config.json").write_text("{}")
    assert read_serve_config([str(tmp_path)]).models.hf_checkpoint == str(tmp_path / "checkpoints" / "step-10")
    config = read_serve_config([str(folder), "--port", "0", "--served-model-name", "x", "--engine-max-running", "3"])
    assert (config.models.hf_checkpoint, config.serve.port) == (str(folder), 0)
    assert (config.serve.served_model_name, config.native.engine_max_running) == ("x", 3)


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path):
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert read_key("--api-key-file", None, None) is None
    assert read_key("--api-key-file", None, "from-env") == "from-env"
    assert read_key("--api-key-file", str(file), "from-env") == "from-file"
    file.write_text(" \n")
    for wrong in (file, tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="--api-key-file"):
            read_key("--api-key-file", str(wrong), None)


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_other_machines_need_a_key(folder: Path, host: str, own: bool):
    assert find_key_problem(host, "key", allow_unauthenticated=False) is None
    assert find_key_problem(host, None, allow_unauthenticated=True) is None
    assert (find_key_problem(host, None, allow_unauthenticated=False) is None) == own
    if not own:
        with pytest.raises(UsageError, match="--allow-unauthenticated"):
            serve(read_serve_config([str(folder), "--host", host]), {})


def test_a_server_comes_answers_and_goes(folder: Path):
    command = [sys.executable, "-m", "miles.launch.main", "serve", str(folder), "--port", "0", "--device", "cpu"]
    environment = os.environ | {"MILES_API_KEY": "hush", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--served-model-name", "tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("Serving tiny at http://127.0.0.1:"), line
        url = line.split()[3]
        body = json.dumps({"text": "the quick", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}).encode()
        ask = urllib.request.Request(f"{url}/generate", body, {"Authorization": "Bearer hush"})
        with urllib.request.urlopen(ask) as response:
            assert len(json.load(response)["output_ids"]) == 4
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=60)
    assert server.returncode == 0, err
    assert "hush" not in line + out + err and "Traceback" not in err
