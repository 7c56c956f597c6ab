"""The exit status of ``miles train``, row by row of the table in docs/run_directory.md."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.small_run import write_inputs

from miles.core.errors import MilesError
from miles.launch import main as launch_main
from miles.launch.commands.train import UPLOAD_FAILED
from miles.launch.main import main
from miles.launch.runtime.signals import STOP_SIGNALS, StopSignal, exit_code_from_signal

HOOKS = """
from miles.core.protocols import FilterResult

class Broken(BrokenPipeError):
    pass

async def generate(prompt, engine, sampling):
    raise BrokenPipeError(32, "Broken pipe")

async def leave(prompt, engine, sampling):
    raise SystemExit(0)

async def reward(prompt, trajectory):
    raise SystemExit(0)

async def group_reward(prompt, trajectories):
    raise BrokenPipeError(32, "Broken pipe")

async def rollout(prompt, engine, sampling, num_samples, default_rollout):
    raise SystemExit(0)

def source(prompts):
    raise BrokenPipeError(32, "Broken pipe")

class Source:
    def __init__(self, prompts):
        pass
    def next(self):
        raise SystemExit(0)
    def state(self):
        return {}
    def load(self, state):
        pass

def filter(group):
    raise SystemExit(0)

def sample_filter(group):
    raise BrokenPipeError(32, "Broken pipe")

def advantage(batch):
    raise SystemExit(0)

def log(step, groups, metrics):
    raise BrokenPipeError(32, "Broken pipe")
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "hooks.py").write_text(HOOKS)
    return folder


def line(inputs: Path, run: Path, *more: str) -> list[str]:
    return [
        *("train", "--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "train.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "4", "--num-rollout", "1", "--num-threads", "1", "--device", "cpu"),
        *("--rm-type", "deterministic_random", "--view", "plain", *more),
    ]


def test_the_table_lists_every_status():
    page = (Path(__file__).parents[2] / "docs" / "run_directory.md").read_text()
    table = page.partition("## Exit status")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if re.match(r"\| [\d, ]+ \|", row)]
    listed = {int(number) for row in rows for number in row.split(",")}
    assert listed == {0, 1, 2, UPLOAD_FAILED, *map(exit_code_from_signal, STOP_SIGNALS), 128 + signal.SIGKILL}


def test_a_finished_run_and_only_that_is_0(inputs: Path, tmp_path: Path):
    assert main(line(inputs, tmp_path / "run")) == 0
    assert main(line(inputs, tmp_path / "run")) == 0


def test_a_wrong_command_is_2(inputs: Path, tmp_path: Path):
    assert main(line(inputs, tmp_path / "run", "--rollout-batch-size", "none")) == 2
    assert not (tmp_path / "run").exists()


def test_data_whose_first_rows_cannot_be_read_is_2(inputs: Path, tmp_path: Path, capsys):
    (tmp_path / "bad.jsonl").write_text("{")
    command = line(inputs, tmp_path / "run")
    command[command.index("--prompt-data") + 1] = str(tmp_path / "bad.jsonl")
    assert main(command) == 2
    assert "bad.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "name", "says"),
    [
        ("--custom-generate-function-path", "generate", r"hooks.py:generate raised BrokenPipeError: .* line \d+"),
        ("--custom-generate-function-path", "leave", "hooks.py:leave raised SystemExit: 0"),
        ("--custom-rm-path", "reward", r"The reward failed for 3 trajectories in a row.*\(SystemExit: 0\)"),
        ("--rollout-function-path", "rollout", "hooks.py:rollout raised SystemExit: 0"),
        ("--data-source-path", "source", "hooks.py:source raised BrokenPipeError"),
        ("--data-source-path", "Source", "The data source raised SystemExit: 0"),
        ("--dynamic-sampling-filter-path", "filter", "hooks.py:filter raised SystemExit: 0"),
        ("--rollout-sample-filter-path", "sample_filter", "hooks.py:sample_filter raised BrokenPipeError"),
        ("--custom-advantage-function-path", "advantage", "hooks.py:advantage raised SystemExit: 0"),
        ("--custom-rollout-log-function-path", "log", "hooks.py:log raised BrokenPipeError"),
    ],
)
def test_a_hook_that_raises_is_1_and_named(inputs: Path, tmp_path: Path, capsys, flag: str, name: str, says: str):
    more = (flag, f"{inputs / 'hooks.py'}:{name}", "--max-reward-failures", "3")
    command = line(inputs, tmp_path / "run", *more)
    if flag == "--custom-rm-path":
        at = command.index("--rm-type")
        del command[at : at + 2]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert re.search(says, said), said
    assert "Traceback" not in said


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (MilesError("engine 0 is lost"), 1, "miles: engine 0 is lost"),
        (MemoryError(), 1, "out of memory"),
        (OutOfMemoryError("CUDA out of memory"), 1, "the device is out of memory: CUDA out of memory"),
        (KeyboardInterrupt(), 130, "miles: interrupted."),
        (StopSignal(signal.SIGTERM), 143, "miles: interrupted."),
        (StopSignal(signal.SIGHUP), 129, "miles: interrupted."),
        (BrokenPipeError(32, "Broken pipe"), 1, "a pipe to another process of the run was closed"),
    ],
)
def test_other_ends_have_their_status_and_a_sentence(
    inputs: Path, tmp_path: Path, capsys, monkeypatch, error, status, says
):
    def fail(*_):
        raise error

    monkeypatch.setattr("miles.launch.commands.train.train", fail)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main(line(inputs, tmp_path / "run")) == status
    finally:
        signal.signal(signal.SIGINT, before)
    assert says in capsys.readouterr().err


def test_an_error_of_the_program_is_raised(inputs: Path, tmp_path: Path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("miles.launch.commands.train.train", fail)
    with pytest.raises(ZeroDivisionError):
        main(line(inputs, tmp_path / "run"))


def test_a_thread_that_never_ends_does_not_keep_the_process():
    program = (
        "import sys, threading, time, miles.launch.main as launch; launch._EXIT_SECONDS = 0.1; "
        "threading.Thread(target=time.sleep, args=(1e6,)).start(); sys.argv = ['miles', '--version']; "
        "sys.exit(launch.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.startswith("miles ")


def test_the_interpreter_is_not_taken_apart_at_the_end():
    program = (
        "import atexit, sys, time, miles.launch.main as launch\n"
        "class Stuck:\n"
        "    def __del__(self): time.sleep(1e6)\n"
        "stuck = Stuck()\n"
        "atexit.register(print, 'exit functions run')\n"
        "sys.argv = ['miles', '--version']\n"
        "sys.exit(launch.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.endswith("exit functions run\n")


def test_an_error_of_the_program_ends_the_process_with_its_traceback():
    program = (
        "import sys, miles.launch.main as launch\n"
        "launch._dispatch = lambda argv: 1 / 0\n"
        "sys.argv = ['miles', '--version']\n"
        "sys.exit(launch.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_reader_that_goes_is_no_error_of_a_command_that_prints():
    command = f"{sys.executable} -m miles.launch.main train --help | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert launch_main.COMMANDS["train"].usage in done.stdout
