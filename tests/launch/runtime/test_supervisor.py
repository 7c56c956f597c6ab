"""The parent of ``--max-restarts``, with children that end in every way a run can."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles.launch.runtime.supervisor import DO_NOT_RESTART, Supervisor

LIVES = """
import os, signal, sys
from pathlib import Path
from miles.launch.runtime.supervisor import start_supervised_heartbeat
here = Path(sys.argv[1])
number = len(list(here.glob("life-*")))
(here / f"life-{number}").touch()
"""


def lived(here: Path, rest: str, *, most: int = 2, patience: float = 0.0) -> tuple[int, int]:
    """The exit code, and how many lives there were, of a child that goes on with ``rest``."""
    words = [sys.executable, "-c", LIVES + rest, str(here)]
    code = Supervisor(words, here, max_restarts=most, heartbeat_timeout=patience, backoff=0.01).run()
    return code, len(list(here.glob("life-*")))


@pytest.mark.parametrize(
    ("rest", "code", "lives"),
    [
        ("", 0, 1),
        ("sys.exit(2)", 2, 1),  # bad input
        ("sys.exit(130)", 130, 1),  # the user asked
        ("sys.exit(1 if number < 2 else 0)", 0, 3),
        ("sys.exit(1)", 1, 3),
        (f"sys.exit({DO_NOT_RESTART})", 1, 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, 3),
        ("raise MemoryError", 1, 3),
    ],
)
def test_a_child_is_started_again_where_that_may_help(tmp_path: Path, rest: str, code: int, lives: int):
    assert lived(tmp_path, rest) == (code, lives)


def test_a_new_checkpoint_gives_all_restarts_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    rest = """
if number < 5:
    (here / "checkpoints" / f"step-{number:06d}").mkdir(parents=True)
sys.exit(1)
"""
    assert lived(tmp_path, rest, most=1) == (1, 6)
    said = capfd.readouterr().err.strip().splitlines()
    assert said[-1] == (
        "miles: the run ended with exit code 1; giving up after 1 restarts without a checkpoint after "
        "step 4 (--max-restarts); fix the cause, and the same command resumes the run."
    )
    assert said[0].endswith("it is restarted in 0.01 s (restart 1 of at most 1 without a new checkpoint).")


def test_a_frozen_child_is_ended_and_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    rest = "start_supervised_heartbeat()\nif number < 1: os.kill(os.getpid(), signal.SIGSTOP)"
    assert lived(tmp_path, rest, patience=2.0) == (0, 2)
    assert "sent no heartbeat for 2 s (--heartbeat-timeout) and was killed" in capfd.readouterr().err


def test_a_stop_is_given_on_once_and_not_mended(tmp_path: Path):
    child = LIVES + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); print('on', flush=True); signal.pause()"
    parent = f"""
import sys
from pathlib import Path
from miles.launch.runtime.supervisor import Supervisor
words = [sys.executable, "-c", {child!r}, sys.argv[1]]
sys.exit(Supervisor(words, Path(sys.argv[1]), max_restarts=5, heartbeat_timeout=0.0).run())
"""
    going = subprocess.Popen([sys.executable, "-c", parent, str(tmp_path)], stdout=subprocess.PIPE)
    assert going.stdout is not None
    assert going.stdout.readline() == b"on\n"
    os.kill(going.pid, signal.SIGTERM)
    assert going.wait(60) == 130
    going.stdout.close()
    assert len(list(tmp_path.glob("life-*"))) == 1


def test_a_child_whose_parent_is_killed_is_asked_to_stop(tmp_path: Path):
    child = (
        LIVES
        + """
signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), sys.exit(0)))
start_supervised_heartbeat()
print("on", flush=True)
while True: signal.pause()
"""
    )
    parent = f"""
import sys
from pathlib import Path
from miles.launch.runtime.supervisor import Supervisor
words = [sys.executable, "-c", {child!r}, sys.argv[1]]
Supervisor(words, Path(sys.argv[1]), max_restarts=5, heartbeat_timeout=1.0).run()
"""
    going = subprocess.Popen([sys.executable, "-c", parent, str(tmp_path)], stdout=subprocess.PIPE)
    assert going.stdout is not None
    assert going.stdout.readline() == b"on\n"
    going.kill()
    assert going.stdout.readline() == b"asked\n"
    going.wait()
    going.stdout.close()
