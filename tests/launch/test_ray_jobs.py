"""A run that is submitted as a job of a Ray cluster: its driver is started there, and finds the cluster by itself."""

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.launch.small_run import ROOT, flags, write_inputs

pytest.importorskip("ray")
# What ray[default] adds: without it a cluster has no door for jobs.
pytest.importorskip("aiohttp_cors")
pytest.importorskip("opencensus")

pytestmark = pytest.mark.ray


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        free = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in free:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in free]


@pytest.fixture(scope="module")
def jobs():
    """A cluster that takes jobs, and the address it takes them at."""
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobSubmissionClient

    head: dict[str, Any] = {"num_cpus": 3, "object_store_memory": 80 << 20, "include_dashboard": True}
    # Its agents take long to start on a machine that is busy: with known ports nothing waits for them.
    agents = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    port, *ports = free_ports(1 + len(agents))
    head |= dict(zip(agents, ports, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_agent_register_timeout_ms", "300000")
        made = Cluster(initialize_head=True, head_node_args={**head, "dashboard_port": port})
    url = f"http://127.0.0.1:{port}"
    try:
        yield JobSubmissionClient(url), url
    finally:
        made.shutdown()


def around() -> dict[str, str]:
    """Where this package is, which on a cluster is installed on every node."""
    return {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}


def line(tmp_path: Path, run: Path, *more: str) -> str:
    inputs = write_inputs(tmp_path / "inputs")
    words = ("--runtime", "ray", "--rollout-backend", "served", "--rollout-num-gpus", "1", *more)
    return shlex.join([sys.executable, "train.py", *flags(inputs, run, *words, steps=2)])


def went_well(run: Path) -> None:
    rows = [json.loads(each) for each in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]


def test_a_job_is_a_run_on_the_cluster_it_was_submitted_to(jobs, tmp_path):
    client, _ = jobs
    run = tmp_path / "run"
    job = client.submit_job(entrypoint=f"cd {ROOT} && {line(tmp_path, run)}", runtime_env={"env_vars": around()})

    async def said() -> str:
        """All that it says, until it has ended."""
        async with asyncio.timeout(900):
            return "".join([lines async for lines in client.tail_job_logs(job)])

    heard = asyncio.run(said())
    assert client.get_job_status(job) == "SUCCEEDED", heard
    went_well(run)
    assert "step 2/2" in heard


def test_the_command_line_submits_with_the_folder_it_stands_in(jobs, tmp_path):
    """``ray job submit --working-dir``: the driver's folder on the cluster is a copy of this one's train.py."""
    _, url = jobs
    run, here = tmp_path / "run", tmp_path / "here"
    here.mkdir()
    (here / "train.py").write_text((ROOT / "train.py").read_text())
    reported = json.dumps({"env_vars": around()})
    words = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", url]
    words += ["--working-dir", str(here), "--runtime-env-json", reported, "--", *shlex.split(line(tmp_path, run))]
    done = subprocess.run(words, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    went_well(run)
