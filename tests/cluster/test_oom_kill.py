"""The kernel's out-of-memory killer, told from other senders of SIGKILL by planted cgroup files."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster.test_spmd import team
from tests.tiers import examples

from miles.backends.remote.process.server import ServerCommand, ServerProcess
from miles.cluster.oom_kill import MemoryCgroup, OomKillMonitor
from miles.core.errors import TrainerError
from miles.launch.runtime.supervisor import Supervisor

GIB = 1 << 30
REACHED = "SIGKILL: the kernel killed it because the cgroup's memory limit of 4 GiB was reached"


def plant_v2(here: Path, *, kills: int = 0, limit: str = "max", parent_limit: str = "max", path: str = "/pod/own"):
    """The files of a process in the cgroup /pod/own of the unified hierarchy."""
    own = here / "cgroup" / "pod" / "own"
    own.mkdir(parents=True, exist_ok=True)
    (here / "self").mkdir(exist_ok=True)
    (here / "self" / "cgroup").write_text(f"0::{path}\n")
    (own / "memory.events").write_text(f"low 0\nhigh 0\nmax 12\noom 1\noom_kill {kills}\noom_group_kill 0\n")
    (own / "memory.max").write_text(f"{limit}\n")
    (own.parent / "memory.max").write_text(f"{parent_limit}\n")
    return MemoryCgroup.find(here, here / "cgroup")


def plant_v1(here: Path, *, kills: int = 0, limit: int = (1 << 63) - 4096):
    own = here / "cgroup" / "memory" / "job"
    own.mkdir(parents=True, exist_ok=True)
    (here / "self").mkdir(exist_ok=True)
    (here / "self" / "cgroup").write_text("5:devices:/\n4:cpu,memory:/job\n0::/\n")
    (own / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    (own / "memory.limit_in_bytes").write_text(f"{limit}\n")
    return MemoryCgroup.find(here, here / "cgroup")


@pytest.mark.parametrize(
    ("plant", "limit"),
    [
        (plant_v2, {"limit": str(4 * GIB)}),
        (plant_v2, {"parent_limit": str(4 * GIB), "limit": str(9 * GIB)}),
        (plant_v1, {"limit": 4 * GIB}),
    ],
)
def test_a_kill_that_the_cgroup_counted_is_the_kernels(tmp_path: Path, plant, limit):
    monitor = OomKillMonitor(plant(tmp_path, kills=2, **limit))
    assert monitor.describe_exit(-9) == "SIGKILL, which another process sent"
    plant(tmp_path, kills=3, **limit)
    for code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        assert monitor.describe_exit(code) == REACHED
    assert monitor.describe_exit(1) == "exit code 1"
    assert monitor.describe_exit(-signal.SIGTERM) == "SIGTERM"


@pytest.mark.parametrize("plant", [plant_v2, plant_v1])
def test_without_a_limit_it_was_the_host_whose_memory_ran_out(tmp_path: Path, plant):
    monitor = OomKillMonitor(plant(tmp_path))
    plant(tmp_path, kills=1)
    assert monitor.describe_exit(-9) == "SIGKILL: the kernel killed it because the host's memory was used up"


def test_a_path_of_the_host_is_looked_for_where_the_containers_cgroup_is_mounted(tmp_path: Path):
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup" / "memory.events").write_text("oom_kill 7\n")
    found = plant_v2(tmp_path, path="/kubepods/burstable/4711")
    assert found is not None and found.count_kills() == 7


@settings(max_examples=examples(30), deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=40))
def test_no_content_of_the_files_is_an_error(table: bytes, events: bytes, limit: bytes):
    with TemporaryDirectory() as folder:
        here = Path(folder)
        plant_v2(here)
        (here / "self" / "cgroup").write_bytes(table)
        own = here / "cgroup" / "pod" / "own"
        (own / "memory.events").write_bytes(events)
        (own / "memory.max").write_bytes(limit)
        found = MemoryCgroup.find(here, here / "cgroup") or MemoryCgroup(own, here / "cgroup")
        assert OomKillMonitor(found).describe_exit(-9).startswith("SIGKILL")


def test_where_nothing_is_known_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert MemoryCgroup.find(tmp_path, tmp_path) is None
    monkeypatch.setattr(MemoryCgroup, "find", classmethod(lambda cls: None))
    assert OomKillMonitor().describe_exit(-9) == "SIGKILL (the kernel does this when memory runs out)"


def test_a_kill_of_long_ago_was_that_of_another_process(tmp_path: Path):
    clock = [0.0]
    monitor = OomKillMonitor(plant_v2(tmp_path, limit=str(4 * GIB)), now=lambda: clock[0])
    plant_v2(tmp_path, kills=1, limit=str(4 * GIB))
    clock[0] = 11.0
    monitor.note_alive()
    assert monitor.describe_exit(-9) == REACHED  # counted, but perhaps not quite dead then
    clock[0] = 22.0
    monitor.note_alive()
    assert monitor.describe_exit(-9) == "SIGKILL, which another process sent"


# -- who says it ------------------------------------------------------------------------------------


@pytest.fixture
def oom_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that ends as the OOM killer ends it: its cgroup counts the kill."""
    planted = plant_v2(tmp_path, limit=str(4 * GIB))
    monkeypatch.setattr(MemoryCgroup, "find", classmethod(lambda cls, *places: planted))
    assert planted is not None
    events = planted.folder / "memory.events"
    program = f"import os; open({str(events)!r}, 'w').write('oom_kill 1\\n'); os.kill(os.getpid(), 9)"
    return [sys.executable, "-I", "-c", program]


def test_the_supervisor_says_that_the_run_was_killed_for_its_memory(tmp_path: Path, oom_kill: list[str], capfd):
    assert Supervisor(oom_kill, tmp_path, max_restarts=0, heartbeat_timeout=0.0).run() == 137
    assert f"the run was killed by {REACHED}; giving up" in capfd.readouterr().err


def test_an_engine_server_that_is_killed_for_its_memory_says_so(tmp_path: Path, oom_kill: list[str]):
    server = ServerProcess("engine 0", tmp_path / "engine-0.log")
    server.start(ServerCommand(argv=tuple(oom_kill)), "127.0.0.1")
    try:
        assert server.wait() == server.exit_reason() == f"engine 0 ended with {REACHED}"
    finally:
        server.end()


def test_a_rank_that_is_killed_for_its_memory_is_named_with_the_limit(tmp_path: Path, monkeypatch):
    planted = plant_v2(tmp_path, limit=str(4 * GIB))
    monkeypatch.setattr(MemoryCgroup, "find", classmethod(lambda cls, *places: planted))
    with team(2) as made:
        (pid,) = made.gather_replies()
        plant_v2(tmp_path, kills=1, limit=str(4 * GIB))
        made.broadcast("wait", 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrainerError, match=f"rank 1 of 2 ended with {REACHED}; begin again"):
            made.gather_replies()


def test_a_child_that_somebody_kills_is_not_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planted = plant_v2(tmp_path, limit=str(4 * GIB))
    monitor = OomKillMonitor(planted)
    child = subprocess.Popen([sys.executable, "-I", "-c", "input()"], stdin=subprocess.PIPE)
    child.kill()
    child.communicate()
    assert monitor.describe_exit(child.returncode) == "SIGKILL, which another process sent"
