"""The sandbox whose namespaces bwrap builds holds what the native one holds."""

import asyncio
import shutil

import pytest
from tests.rollout.sandbox import escape_programs
from tests.rollout.sandbox.test_escape import listed_numbers

from miles.core.errors import UsageError
from miles.rollout.sandbox import isolation
from miles.rollout.sandbox.protocol import MIB, IsolationPlan, SandboxLimits
from miles.rollout.sandbox.run import Sandbox, create_sandbox


@pytest.fixture(scope="module")
def walls() -> IsolationPlan:
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    try:
        create_sandbox(unsandboxed=False, concurrency=1, backend="bubblewrap")
    except UsageError as error:
        pytest.skip(str(error))
    return isolation.plan_isolation(unsandboxed=False, backend="bubblewrap")


def test_no_attempt_gets_out(walls, tmp_path):
    for plan in (walls, walls._replace(landlock=0)):
        assert asyncio.run(escape_programs.all_tried(plan, tmp_path / str(plan.landlock))) == []


@pytest.mark.parametrize(
    ("program", "limits", "killed_by"),
    [
        ("while True: pass", SandboxLimits(wall=60.0, cpu=0.3), "cpu"),
        ("import time\ntime.sleep(1000)", SandboxLimits(wall=0.3), "wall"),
        ("while True: print('x' * 1000)", SandboxLimits(output=50_000), "output"),
        ("x = []\nwhile True: x.append(b'x' * (1 << 20))", SandboxLimits(memory=96 * MIB), "memory"),
        (escape_programs.FORKING["processes"], SandboxLimits(wall=60.0), "processes"),
        ("print(6 * 7)", SandboxLimits(), None),
    ],
)
def test_limits_are_the_same(walls, program, limits, killed_by):
    outcome = asyncio.run(Sandbox(walls).run(program, limits=limits))
    assert outcome.killed_by == killed_by or (killed_by == "memory" and b"MemoryError" in outcome.stderr)
    assert killed_by is not None or outcome.stdout == b"42\n"


def test_a_program_sees_no_source_no_processes_and_its_own_folder(walls):
    program = (
        "import os\nprint(os.getcwd(), os.listdir('/proc'), os.path.exists('/miles-source/miles'), os.getuid() != 0)"
    )
    outcome = asyncio.run(Sandbox(walls._replace(landlock=0)).run(program))
    assert outcome.stdout == b"/scratch [] False True\n"


def test_signals_do_not_end_the_supervisor_and_numbers_outside_the_tables_are_unknown(walls):
    assert asyncio.run(Sandbox(walls).run(escape_programs.SIGNALS)).stdout == b"7\n"
    sweep = escape_programs.SWEEP.replace("SKIPPED", str(listed_numbers(walls)))
    assert asyncio.run(Sandbox(walls).run(sweep, limits=escape_programs.LIMITS)).is_success


def test_a_machine_without_bwrap_is_told_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="install bubblewrap"):
        isolation.plan_isolation(unsandboxed=True, backend="bubblewrap")
