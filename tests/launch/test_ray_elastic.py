"""Devices of a Ray cluster move between the planes: a rank's actor gives way to an engine's, and the reverse."""

import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.chaos_report import summarize_run
from tests.launch.small_run import Command, flags, miles, write_inputs
from tests.launch.test_elastic_runs import ELASTIC
from tests.launch.test_engines_command import events
from tests.launch.test_ray_runs import WATCH

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def cluster():
    """Two devices on the driver's node, and one on another."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        made.add_node(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, _system_config=WATCH)
        made.add_node(num_cpus=1, object_store_memory=80 << 20)
        yield made
    finally:
        made.shutdown()


def line_of(inputs: Path, run: Path, cluster, ranks: int, engines: int, steps: int) -> list[str]:
    line = flags(inputs, run, *ELASTIC, "--runtime", "ray", "--ray-address", cluster.address, steps=steps)
    line[line.index("--actor-num-gpus-per-node") + 1] = str(ranks)
    line[line.index("--rollout-num-gpus") + 1] = str(engines)
    return line


def slowly(step: int, update: int, model: object, optimizer: object) -> None:
    """A trainer that takes so long that rollout waits for every step, on a machine that is busy too."""
    threading.Event().wait(6.0)


def test_a_rank_on_a_node_becomes_an_engine_and_a_run_that_goes_on_has_what_it_had(inputs, cluster, tmp_path):
    run = tmp_path / "run"
    line = line_of(inputs, run, cluster, ranks=2, engines=1, steps=1000)
    line[line.index("--custom-rm-path") + 1] = "tests.launch.test_elastic_runs:late"
    going = Command("train", *line)
    going.wait_to_hear("engine 1 at")
    going.interrupt()
    done = going.done()
    assert done.returncode == 130, done.stderr
    moved = events(run, "DevicesMoved")
    assert [(each["ranks"], each["engines"]) for each in moved] == [(1, 2)]
    made = summarize_run(run)["steps"]
    assert [each["version"][1] for each in events(run, "StepFinished")] == list(range(1, made + 1))

    line[line.index("--num-rollout") + 1] = str(made + 2)
    again = miles("train", *line)
    assert again.returncode == 0, again.stderr
    assert "Ranks 1, engines 2, as this run had them last (--elastic)." in again.stdout
    assert summarize_run(run)["steps"] == made + 2 and len(events(run, "DevicesMoved")) == 1


def test_an_engine_becomes_a_rank_on_its_node(inputs, cluster, tmp_path):
    run = tmp_path / "run"
    line = line_of(inputs, run, cluster, ranks=1, engines=2, steps=8)
    line += ["--custom-megatron-before-train-step-hook-path", f"{__name__}:slowly"]
    done = miles("train", *line)
    assert done.returncode == 0, done.stderr
    moved = events(run, "DevicesMoved")
    assert (moved[0]["ranks"], moved[0]["engines"]) == (2, 1) and "rollout waited" in moved[0]["reason"]
    assert [each["name"] for each in events(run, "EngineLeft")] == ["engine 0"]
    assert summarize_run(run)["steps"] == 8
