"""Sandbox resource limits: a program that exceeds one is ended, the limit is named, and nothing is left behind."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import rmtree

import pytest
from tests.rollout.sandbox import escape_programs

from miles.rollout.sandbox.protocol import MIB, IsolationPlan, SandboxLimits, SandboxResult
from miles.rollout.sandbox.run import Sandbox

ROOMY = SandboxLimits(wall=60.0, cpu=60.0)


@pytest.fixture(params=["chosen", "alone"], scope="module")
def walls(request, found, plan) -> IsolationPlan:
    """The walls of choice, and the least there may be."""
    if request.param == "chosen":
        return plan
    if not found.landlock:
        pytest.skip("no Landlock here")
    return IsolationPlan(landlock=found.landlock, seccomp=True, apart=not found.apart)


def run(walls: IsolationPlan, program: str, limits: SandboxLimits = ROOMY, **more) -> SandboxResult:
    return asyncio.run(Sandbox(walls).run(program, limits=limits, **more))


def can_fork(walls: IsolationPlan) -> bool:
    return bool(walls.namespaces) or walls.apart or os.geteuid() != 0


def test_an_endless_loop_runs_out_of_cpu_time(walls):
    outcome = run(walls, "while True: pass", SandboxLimits(wall=60.0, cpu=0.3))
    assert outcome.killed_by == "cpu" and outcome.exit is None and outcome.signal is not None


def test_an_endless_wait_runs_out_of_time(walls):
    outcome = run(walls, "import time\ntime.sleep(1000)", SandboxLimits(wall=0.3))
    assert outcome.killed_by == "wall" and outcome.seconds >= 0.3


def test_a_program_cannot_shrug_off_the_limit_by_catching_signals(walls):
    deaf = "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
    assert run(walls, deaf + "while True: pass", SandboxLimits(wall=60.0, cpu=0.3)).killed_by == "cpu"


def test_endless_output_is_cut_off(walls):
    outcome = run(walls, "while True: print('x' * 1000)", SandboxLimits(wall=60.0, cpu=60.0, output=50_000))
    assert outcome.killed_by == "output"
    assert len(outcome.stdout) == 50_000 and set(outcome.stdout) == set(b"x\n")


def test_endless_complaints_are_cut_off(walls):
    program = "import os\nwhile True: os.write(2, b'e' * 4096)"
    outcome = run(walls, program, SandboxLimits(wall=60.0, cpu=60.0, output=10_000))
    assert outcome.killed_by == "output" and outcome.stderr == b"e" * 10_000


def test_output_up_to_the_limit_is_whole(walls):
    outcome = run(walls, "print('x' * 9_999)", SandboxLimits(output=10_000))
    assert outcome.is_success and outcome.killed_by is None and len(outcome.stdout) == 10_000


def test_a_program_that_grows_runs_out_of_memory(walls):
    outcome = run(walls, "x = []\nwhile True: x.append(bytearray(1 << 20))", SandboxLimits(wall=60.0, memory=96 * MIB))
    assert outcome.killed_by == "memory" or b"MemoryError" in outcome.stderr
    assert not outcome.is_success


def test_a_huge_request_for_memory_is_refused(walls):
    outcome = run(walls, "x = bytearray(1 << 40)")
    assert outcome.exit == 1 and b"MemoryError" in outcome.stderr


def test_a_fork_bomb_without_forks_is_a_loop(walls):
    if can_fork(walls):
        pytest.skip("tested below")
    assert run(walls, escape_programs.FORKING["processes"], SandboxLimits(wall=60.0, cpu=0.5)).killed_by == "cpu"


def test_a_thread_bomb_is_ended(walls):
    program = """
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(1000,)).start()
    except RuntimeError: pass
"""
    outcome = run(walls, program, SandboxLimits(wall=60.0, cpu=1.0))
    assert outcome.killed_by in (("processes", "memory") if can_fork(walls) else ("cpu", "output"))


def test_limits_are_those_of_all_processes_together(walls):
    if not can_fork(walls):
        pytest.skip("root without namespaces may not fork here")
    assert asyncio.run(escape_programs.all_forked(walls)) == []


def test_buffers_in_the_kernel_count_as_memory(walls):
    if not can_fork(walls):
        pytest.skip("one process cannot hold enough of them")
    program = """
import os, socket, time
for _ in range(11):
    if os.fork() == 0:
        break
kept = []
try:
    while True:
        kept.append(socket.socketpair())
        for end in kept[-1]:
            end.setblocking(False)
            try:
                while end.send(b"x" * 4096): pass
            except BlockingIOError: pass
except OSError: pass
time.sleep(1000)
"""
    outcome = run(walls, program, SandboxLimits(wall=60.0, cpu=60.0, memory=160 * MIB))
    assert outcome.killed_by == "memory"


def test_pipes_keep_their_size(walls):
    program = "import fcntl, os\nr, w = os.pipe()\nfor size in (4096, 1 << 20):\n  try: fcntl.fcntl(w, 1031, size)\n"
    outcome = run(
        walls, program + "  except PermissionError: print('no', end=' ')\nprint(fcntl.fcntl(w, 1032) <= 65536)"
    )
    assert outcome.stdout == b"no no True\n"


def test_files_in_memory_count_as_memory(plan):
    if not plan.namespaces:
        pytest.skip("the scratch folder is on disk")
    program = "f = open('f', 'wb', buffering=0)\nfor _ in range(60): f.write(b'x' * (1 << 20))\nwhile True: pass"
    outcome = run(plan, program, SandboxLimits(wall=60.0, cpu=60.0, memory=48 * MIB))
    assert outcome.killed_by == "memory"


def test_orphans_spend_the_programs_cpu_time(walls):
    if not can_fork(walls):
        pytest.skip("root without namespaces may not fork here")
    # On a busy machine several that have ended wait to be reaped.
    outcome = run(walls, escape_programs.ORPHANS, SandboxLimits(wall=60.0, cpu=1.0, processes=256))
    assert outcome.killed_by == "cpu"


def test_a_file_cannot_be_larger_than_allowed(walls):
    program = "f = open('big', 'wb', buffering=0)\nwhile True: f.write(b'x' * (1 << 16))"
    outcome = run(walls, program, SandboxLimits(file=MIB, scratch=8 * MIB))
    assert outcome.exit == 1 and b"File too large" in outcome.stderr


def test_the_disk_cannot_be_filled(walls):
    program = "for n in range(10_000):\n  with open(f'f{n}', 'wb') as f: f.write(b'x' * (1 << 19))"
    outcome = run(walls, program, SandboxLimits(wall=60.0, cpu=60.0, file=MIB, scratch=4 * MIB))
    assert not outcome.is_success
    assert outcome.killed_by == "output" or b"No space left" in outcome.stderr


def test_files_without_a_name_count_too(walls):
    program = """
import os
kept = []
for n in range(100):
    kept.append(open("f", "w+b", buffering=0))
    os.unlink("f")
    kept[-1].write(b"x" * (1 << 20))
"""
    outcome = run(walls, program + "while True: pass", SandboxLimits(wall=60.0, cpu=60.0, file=MIB, scratch=4 * MIB))
    assert outcome.killed_by == "output" or b"No space left" in outcome.stderr


def test_folders_cannot_be_made_without_end(walls):
    outcome = run(walls, "import os\nwhile True:\n  os.mkdir('d', 0o700)\n  os.chdir('d')")
    assert not outcome.is_success
    assert outcome.killed_by == "output" or b"No space left" in outcome.stderr


def test_a_cancelled_run_leaves_nothing(walls, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o711)
    marker = f"marker_{os.urandom(8).hex()}"

    async def cancelled() -> None:
        command = [os.path.realpath("/bin/sh"), "-c", f"echo up; while :; do :; done # {marker}"]
        task = asyncio.create_task(Sandbox(walls).run(command, limits=ROOMY))
        while not escape_programs.running_with(marker):
            assert not task.done(), task.result()
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert escape_programs.running_with(marker) == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ended_leaves_no_files(walls, monkeypatch):
    # Not in pytest's own folder, which nobody but its owner may enter.
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    folder.chmod(0o711)
    program = """
import os
for depth in range(1200):
    os.mkdir("deeper", 0o700)
    open("file", "w").close()
    os.symlink("file", "link")
    os.chdir("deeper")
os.mkdir("closed", 0)
"""
    outcome = run(walls, program)
    left = list(folder.iterdir())
    rmtree(folder)
    assert outcome.is_success or outcome.killed_by == "output", outcome
    assert left == []


def test_a_program_dies_with_whoever_asked(walls, tmp_path):
    """The asking process is killed outright, and has no time to tell anyone."""
    marker = f"marker_{os.urandom(8).hex()}"
    asking = """
import asyncio, sys, tempfile
from miles.rollout.sandbox.protocol import IsolationPlan
from miles.rollout.sandbox.run import Sandbox
from tests.rollout.sandbox import escape_programs
tempfile.tempdir = sys.argv[2]
plan = IsolationPlan(sys.argv[3], int(sys.argv[4]), True, sys.argv[5] == "True")
asyncio.run(Sandbox(plan).run(["/bin/sh", "-c", f"while :; do :; done # {sys.argv[1][::-1]}"]))
"""
    tmp_path.chmod(0o711)
    reported = [marker[::-1], str(tmp_path), walls.namespaces, str(walls.landlock), str(walls.apart)]
    process = subprocess.Popen([sys.executable, "-c", asking, *reported])
    while not escape_programs.running_with(marker):
        assert process.poll() is None
    process.kill()
    process.wait()
    while escape_programs.running_with(marker) or list(
        tmp_path.iterdir()
    ):  # its limits would end it too, but not its folder
        pass
