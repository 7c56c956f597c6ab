"""A run on nodes that share nothing but a wire: each raylet in a network of its own, as on several machines."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree

import pytest
from tests.launch.small_run import ROOT, flags, miles, write_world
from tests.launch.test_ray_runs import same_parts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes networks"),
]

MARK = f"m{os.getpid() % 100_000}"
HOSTS = {f"{MARK}h{i}": f"10.77.0.{i}" for i in (1, 2, 3)}
HEAD = f"{MARK}h1"
PORT = "6399"


def command(*words: str, check: bool = True, **how) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, check=False, **how)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def inside(host: str, *words: str, around: dict[str, str] | None = None, **how) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    return command("ip", "netns", "exec", host, *words, env={**os.environ, **paths, **(around or {})}, **how)


def ip(line: str) -> None:
    command("ip", *line.split())


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    program = str(Path(sys.executable).with_name("ray"))
    few = ("--num-cpus", "1", "--object-store-memory", "90000000", "--disable-usage-stats")
    if command("ip", "link", "add", f"{MARK}b", "type", "bridge", check=False).returncode:
        pytest.skip("this machine makes no networks")
    try:
        ip(f"link set {MARK}b up")
        for host, address in HOSTS.items():
            ip(f"netns add {host}")
            ip(f"link add v{host} type veth peer name e0 netns {host}")
            ip(f"link set v{host} master {MARK}b up")
            ip(f"-n {host} addr add {address}/24 dev e0")
            ip(f"-n {host} link set e0 up")
            ip(f"-n {host} link set lo up")
        head = ("--head", "--port", PORT, "--include-dashboard", "false", "--temp-dir", f"/tmp/{MARK}")
        for host, address in HOSTS.items():
            how = head if host == HEAD else ("--address", f"{HOSTS[HEAD]}:{PORT}")
            inside(host, program, "start", *how, "--node-ip-address", address, *few)
        yield
    finally:
        for host in HOSTS:
            for pid in command("ip", "netns", "pids", host, check=False).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            command("ip", "netns", "del", host, check=False)
        command("ip", "link", "del", f"{MARK}b", check=False)
        rmtree(f"/tmp/{MARK}", ignore_errors=True)


def test_ranks_and_engines_on_other_hosts_make_the_run_of_one_machine(hosts, tmp_path):
    """The cluster is found by RAY_ADDRESS, as in a job; weights go by broadcast."""
    world, far, near = write_world(tmp_path / "world"), tmp_path / "far", tmp_path / "near"
    ranks = ("--actor-num-nodes", "2", "--rollout-num-gpus", "1", "--update-weight-transport", "distributed")
    line = flags(world, far, "--parity", "exact", "--runtime", "ray", "--rollout-backend", "served", *ranks, steps=3)
    words = (sys.executable, "-m", "miles.launch.main", "train", *line)
    done = inside(HEAD, *words, around={"RAY_ADDRESS": f"{HOSTS[HEAD]}:{PORT}"}, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    done = miles("train", *flags(world, near, "--parity", "exact", "--actor-num-gpus-per-node", "2", steps=3))
    assert done.returncode == 0, done.stderr
    same_parts(far, near)
    words = (far / "logs" / "engine-0.log").read_text().splitlines()[0].split()
    assert words[words.index("--host") + 1] in set(HOSTS.values()) - {HOSTS[HEAD]}
