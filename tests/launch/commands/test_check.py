"""Behaviour of ``miles check``: what it finds before a model is loaded, each fault planted as a user would meet it."""

import json
import socket

import pytest
from tests.launch.small_run import flags, write_inputs

from miles.launch.commands.check import list_traps
from miles.launch.main import main
from miles.launch.read_config import read


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def check(*argv: str) -> int:
    return main(["check", *argv])


def test_a_sound_run_passes_and_loads_no_weights(inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("miles.launch.build.models.load_model", lambda *_: pytest.fail("the model was loaded"))
    assert check(*flags(inputs, tmp_path / "run")) == 0
    printed = capsys.readouterr().out
    assert "24 prompts; the first has" in printed and "6 prompts; the first has" in printed
    assert "scores" in printed and "checkpoints of about" in printed
    assert printed.endswith("verdict: this run can start.\n")
    assert not (tmp_path / "run").exists(), "a check writes nothing"


def test_a_missing_column_is_found(inputs, tmp_path, capsys):
    argv = [word if word != "label" else "answer" for word in flags(inputs, tmp_path / "run")]
    assert check(*argv) != 0
    streams = capsys.readouterr()
    assert "answer" in streams.out + streams.err


def test_a_grader_that_raises_is_found(inputs, tmp_path, capsys):
    assert check(*flags(inputs, tmp_path / "run", reward="broken")) == 1
    assert "problem: The reward of train data cannot grade the reply" in capsys.readouterr().out


def test_a_prompt_that_never_asks_for_the_form_the_grader_wants_is_named(inputs, tmp_path, capsys):
    rows = [{"input": f"What is {n} + 1?", "label": str(n + 1)} for n in range(8)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = flags(inputs, tmp_path / "run")
    argv[argv.index("--prompt-data") + 1] = str(data)
    at = argv.index("--custom-rm-path")
    argv[at : at + 2] = ["--rm-type", "math"]
    argv.remove("--apply-chat-template")
    argv[argv.index("--eval-prompt-data") + 2] = str(data)
    check(*argv)
    assert (
        "The grader wants \\boxed{} and the first prompt of train data does not ask for it" in capsys.readouterr().out
    )


def test_checkpoints_that_do_not_fit_the_disk_are_a_problem(inputs, tmp_path, capsys, monkeypatch):
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("miles.launch.commands.check.shutil.disk_usage", lambda path: usage)
    assert check(*flags(inputs, tmp_path / "run")) == 1
    assert "--keep-checkpoints" in capsys.readouterr().out


def test_a_taken_port_is_a_problem(inputs, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        more = ("--custom-agent-function-path", f"{__name__}:agent", "--session-server-port", port)
        assert check(*flags(inputs, tmp_path / "run", *more)) == 1
    assert f"--session-server-port {port} cannot be used" in capsys.readouterr().out


async def agent(base_url, prompt, request_kwargs, metadata) -> None:
    """An agent that does nothing."""


def test_known_traps_of_the_environment_are_named(inputs, tmp_path):
    config, plan, _ = read("train", flags(inputs, tmp_path / "run", "--parity", "exact"))

    def names(environ, open_files=1 << 16):
        return [name for name, _ in list_traps(config, plan, environ, open_files)]

    assert names({}) == []
    assert names({"http_proxy": "http://proxy:3128"}) == ["http_proxy"]
    assert names({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "localhost,.local"}) == []
    assert names({"NVIDIA_TF32_OVERRIDE": "1", "PYTHONOPTIMIZE": "1"}) == ["NVIDIA_TF32_OVERRIDE", "PYTHONOPTIMIZE"]
