"""Each algorithm, on the demo's model and task: what it maximises goes up."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from tests.launch.small_run import miles

from miles.launch.commands.demo import DemoFolders, grpo_flags
from miles.launch.config import DemoOptions
from miles.schedule.checkpoints import CheckpointDirectory

pytestmark = pytest.mark.slow

STEPS = 40
LINES = {
    "grpo": "",
    "gspo": "--eps-clip 0.02 --eps-clip-high 0.03",
    "cispo": "--eps-clip 1 --eps-clip-high 1",
    "rloo": "",
    "maxrl": "",
    "opo": "",
    "reinforce_plus_plus": "--normalize-advantages",
    "reinforce_plus_plus_baseline": "--normalize-advantages",
    "ppo": "--normalize-advantages --critic-lr 1e-3 --num-critic-only-steps 1 --lambd 0.98",
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> DemoFolders:
    """The demo after its warm-up on demonstrations: about one answer in three is right."""
    places = DemoFolders(root=tmp_path_factory.mktemp("learning") / "demo")
    done = miles("demo", "--plain", "--steps", "1", "--device", "cpu", "--save", str(places.root))
    assert done.returncode == 0, done.stderr
    return places


def rows(run: Path, kind: str) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


@pytest.mark.parametrize("name", LINES)
def test_an_algorithm_improves_what_it_maximises(name, warm, tmp_path):
    newest = CheckpointDirectory(warm.warmup / "checkpoints").latest()
    assert newest is not None
    run = tmp_path / name
    argv = grpo_flags(warm, DemoOptions(steps=STEPS, device="cpu"), newest[0])
    for flag, value in (("--save", str(run)), ("--advantage-estimator", name), ("--eval-interval", str(STEPS))):
        argv[argv.index(flag) + 1] = value
    done = miles("train", *argv, "--num-steps-per-rollout", "2", "--view", "plain", *LINES[name].split())
    assert done.returncode == 0, done.stderr
    rewards = [row["reward"] for row in rows(run, "train")]
    before, after = (row["eval/heldout/reward"] for row in rows(run, "eval"))
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    reported = f"trained on {first:.3f} -> {last:.3f}, held out {before:.3f} -> {after:.3f}"
    assert last > first + 0.1 and after > before + 0.1, reported
