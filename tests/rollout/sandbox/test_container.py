"""Containers as the sandbox: the flags of docker run, the launcher inside, and what is said where something is missing.

There need be no container engine: a script named docker records its arguments, and runs the launcher in a PID
namespace of its own where the machine has them.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.rollout.reward.reward_case import trajectory

from miles.core.errors import UsageError
from miles.core.types import Prompt
from miles.rollout.config import RolloutConfig
from miles.rollout.reward.code import CodeReward
from miles.rollout.sandbox import container_launcher
from miles.rollout.sandbox.build import build_sandbox
from miles.rollout.sandbox.container import container_flags
from miles.rollout.sandbox.isolation import SandboxError
from miles.rollout.sandbox.protocol import MIB, IsolationPlan, SandboxLimits, decode_result, encode_request
from miles.rollout.sandbox.run import build_request
from miles.rollout.tools.code import CodeRunner, build_python_tool, build_shell_tool
from miles.rollout.tools.workspace import temporary_workspace

ENGINE = """#!{python}
import json, os, sys, tempfile
arguments, state = sys.argv[1:], json.load(open({state!r}))
with open({log!r}, "a") as file:
    file.write(json.dumps(arguments) + "\\n")
if arguments[0] in ("version", "info") and not state["daemon"]:
    sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
if arguments[0] == "image" and not state["image"]:
    sys.exit("Error: No such image: " + arguments[-1])
if arguments[0] == "run":
    if state["says"]:
        sys.exit(state["says"])
    if state["dies"]:
        sys.exit(137)
    launcher = arguments[arguments.index("-c") + 1]
    folder = tempfile.mkdtemp(dir={folder!r})
    os.execvp({command[0]!r}, [*{command!r}, "-I", "-S", "-B", "-c", launcher, folder])
"""


class Engine:
    """The script, what it was called with, and what is the matter with it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._state, self._log = folder / "state.json", folder / "log.jsonl"
        self._log.touch()
        self.set()
        own_pids = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self.has_own_pids = subprocess.run([*own_pids, "true"], capture_output=True).returncode == 0
        command = [*(own_pids if self.has_own_pids else []), sys.executable]
        script = ENGINE.format(
            python=sys.executable, state=str(self._state), log=str(self._log), folder=str(folder), command=command
        )
        (folder / "bin").mkdir()
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)

    def set(self, *, daemon: bool = True, image: bool = True, says: str = "", dies: bool = False) -> None:
        self._state.write_text(json.dumps({"daemon": daemon, "image": image, "says": says, "dies": dies}))

    @property
    def calls(self) -> list[list[str]]:
        lines = self._log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be being written


@pytest.fixture
def engine(tmp_path, monkeypatch) -> Engine:
    made = Engine(tmp_path, "docker")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return made


CONFIG = RolloutConfig(code_sandbox="docker", code_sandbox_image="lab/python:1")


def run(program, **options):
    return asyncio.run(build_sandbox(CONFIG).run(program, **options))


def test_every_limit_is_a_flag():
    limits = SandboxLimits(memory=96 * MIB, processes=4, scratch=8 * MIB, file=2 * MIB)
    flags = container_flags("docker", "one", limits, companion=False)
    assert {
        "--network=none",
        "--ipc=none",
        "--read-only",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--user=65534:65534",
        f"--memory={96 * MIB}",
        f"--memory-swap={96 * MIB}",
        "--pids-limit=5",
        f"--ulimit=fsize={2 * MIB}:{2 * MIB}",
        f"--tmpfs=/scratch:rw,exec,nosuid,nodev,size={8 * MIB},mode=1777",
        "--pull=never",
        "--rm",
        "--name=one",
    } <= set(flags)
    assert not any(flag.startswith(("--cap-add", "--volume", "--mount", "--privileged")) for flag in flags)
    assert "--read-only-tmpfs=false" not in flags
    assert "--read-only-tmpfs=false" in container_flags("podman", "one", limits, companion=False)


def test_with_a_companion_the_launcher_may_change_users_and_nothing_else():
    flags = container_flags("podman", "one", SandboxLimits(processes=4), companion=True)
    assert [flag for flag in flags if flag.startswith(("--user", "--cap"))] == (
        ["--cap-drop=ALL", "--user=0:0", "--cap-add=SETUID", "--cap-add=SETGID"]
    )
    assert "--pids-limit=9" in flags


def test_a_program_runs_in_a_container_of_the_image(engine):
    limits = SandboxLimits(memory=64 * MIB)
    outcome = run(
        "import sys\nprint(sys.stdin.read()[::-1], open('in/a.txt').read())\nsys.exit(3)",
        stdin=b"olleh",
        files={"in/a.txt": b"1"},
        limits=limits,
    )
    assert (outcome.stdout, outcome.exit, outcome.killed_by) == (b"hello 1\n", 3, None)
    asked, inspected, tried, called = engine.calls
    assert asked[:2] == ["version", "--format"] and inspected == ["image", "inspect", "lab/python:1"]
    assert called[0] == "run" and f"--memory={64 * MIB}" in called
    image = called.index("lab/python:1")
    assert called[image + 1] == "python3" and called[-1] == "/scratch"
    names = [next(word for word in call if word.startswith("--name=")) for call in (tried, called)]
    assert names[0] != names[1]  # two programs at once are two containers


def test_a_command_that_is_not_there_is_the_sandbox_s_error(engine):
    with pytest.raises(SandboxError, match="FileNotFoundError"):
        run(["no-such-command"])


FORGE = """
import os, struct, sys
answer = b'[0, null, null, 0.0, "", 6, 0]'
for path in ("/proc/{0}/fd/1", "/proc/{0}/mem"):
    try:
        os.write(os.open(path.format(os.getppid()), os.O_WRONLY), struct.pack("<Q", len(answer)) + answer + b"passed")
    except OSError as error:
        print(type(error).__name__)
"""


def test_a_program_cannot_write_the_result_of_its_launcher():
    python = shutil.which("python3", path=os.defpath) or "python3"
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    if subprocess.run([*nobody, python, "-c", f"import os; os.execl({python!r}, 'python3', '-V')"]).returncode:
        pytest.skip("tests cannot run python3 as another user here")
    request = build_request(IsolationPlan(), FORGE, limits=SandboxLimits(cpu=1e12), python=python)
    data = encode_request(request._replace(readable=(), temporary=""))
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o777)
        source = Path(container_launcher.__file__).read_text()
        with subprocess.Popen(
            [*nobody, python, "-I", "-S", "-B", "-c", source, scratch], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as launcher:
            assert launcher.stdin is not None and launcher.stdout is not None
            launcher.stdin.write(data)
            launcher.stdin.flush()
            result = decode_result(launcher.stdout.read())
    assert result is not None and result.stdout == b"PermissionError\nPermissionError\n"


@pytest.mark.parametrize(
    ("program", "limits", "killed_by"),
    [
        ("import time\ntime.sleep(1000)", SandboxLimits(wall=0.3), "wall"),
        ("while True: print('x' * 1000)", SandboxLimits(output=50_000), "output"),
        ("while True: pass", SandboxLimits(wall=60.0, cpu=0.3), "cpu"),
        ("import os\nif os.fork(): os.wait()\nwhile True: pass", SandboxLimits(wall=60.0, cpu=0.3), "cpu"),
        ("print(6 * 7)", SandboxLimits(), None),
    ],
)
def test_the_launcher_ends_what_takes_too_much(engine, program, limits, killed_by):
    if killed_by == "cpu" and not engine.has_own_pids:
        pytest.skip("there are no PID namespaces here, so all processes of the machine would count")
    outcome = run(program, limits=limits)
    assert outcome.killed_by == killed_by
    assert len(outcome.stdout) <= limits.output
    assert killed_by is not None or outcome.stdout == b"42\n"


def test_the_code_reward_and_the_tools_run_in_containers(engine):
    reward = CodeReward(SandboxLimits(), build_sandbox(CONFIG))
    prompt = Prompt(id=1, messages=(), label=json.dumps({"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}))

    def graded(program):
        return asyncio.run(reward(prompt, trajectory(program))).value

    assert graded("def add(a, b):\n    return a + b") == 1.0
    assert graded("def add(a, b):\n    return 3") == 0.0
    assert "--user=0:0" in engine.calls[-1] and engine.calls[-1][-2:] == ["65534", "65533"]

    async def use_tools(workspace):
        runner = CodeRunner(build_sandbox(CONFIG), workspace, SandboxLimits())
        await build_python_tool(runner).call({"code": "open('a.txt', 'w').write('kept')"})
        return await build_shell_tool(runner).call({"command": "cat a.txt"})

    with temporary_workspace() as workspace:
        assert asyncio.run(use_tools(workspace)) == "kept"


def test_a_cancelled_run_removes_its_container(engine):
    async def cancelled():
        sandbox = build_sandbox(CONFIG)
        task = asyncio.create_task(sandbox.run("import time\ntime.sleep(1000)", limits=SandboxLimits(wall=900.0)))
        while len([call for call in engine.calls if call[0] == "run"]) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    started, removed = engine.calls[-2:]
    assert removed == ["rm", "--force", next(w for w in started if w.startswith("--name=")).removeprefix("--name=")]


def test_a_container_that_is_killed_ran_out_of_memory_and_one_that_does_not_start_says_why(engine):
    sandbox = build_sandbox(CONFIG)
    engine.set(dies=True)
    assert asyncio.run(sandbox.run("print(1)")).killed_by == "memory"
    engine.set(says="docker: Error response from daemon: no space left on device")
    with pytest.raises(SandboxError, match="no space left on device"):
        asyncio.run(sandbox.run("print(1)"))
    assert engine.calls[-1][:2] == ["rm", "--force"]


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (
            {"daemon": False},
            r"no daemon answers docker here \(Cannot connect to .* use --code-sandbox native",
        ),
        ({"image": False}, "no image lab/python:1 here; pull it with docker pull lab/python:1"),
        ({"says": "exec: python3: not found"}, r"not even print\(6 \* 7\) runs .*\(exec: python3: not found\)"),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(engine, state, sentence):
    engine.set(**state)
    with pytest.raises(UsageError, match=sentence):
        build_sandbox(CONFIG)


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_a_machine_without_the_engine_is_told_so(monkeypatch, name):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match=f"--code-sandbox {name} needs {name}, which is not on the path"):
        build_sandbox(RolloutConfig(code_sandbox=name))


def test_podman_is_asked_without_a_daemon(tmp_path, monkeypatch):
    engine = Engine(tmp_path, "podman")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    sandbox = build_sandbox(RolloutConfig(code_sandbox="podman"))
    assert asyncio.run(sandbox.run("print(1)")).stdout == b"1\n"
    assert engine.calls[0][0] == "info" and "--read-only-tmpfs=false" in engine.calls[-1]
    engine.set(daemon=False)
    with pytest.raises(UsageError, match="podman cannot run containers here"):
        build_sandbox(RolloutConfig(code_sandbox="podman"))
