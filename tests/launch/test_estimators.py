"""Whole runs with advantages that need the whole batch, through the front door."""

import json
import signal

import pytest
from tests.launch.small_run import everything, flags, miles, write_inputs

from miles.observe.metric import list_undocumented

WITHOUT = ("--use-kl-loss", "--kl-loss-coef", "0.01")
ESTIMATORS = {
    "reinforce_plus_plus": ("--normalize-advantages", "--kl-coef", "0.01", "--kl-loss-type", "k2"),
    "reinforce_plus_plus_baseline": ("--normalize-advantages", "--gamma", "0.99"),
    "ppo": (
        *("--normalize-advantages", "--kl-coef", "0.01", "--lambd", "0.95", "--critic-lr", "2e-2"),
        *("--critic-lr-warmup-iters", "2", "--num-critic-only-steps", "1", "--value-clip", "0.5"),
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def line(inputs, run, estimator, *more, steps=3):
    plain = flags(inputs, run, steps=steps)
    at = plain.index("--use-kl-loss")
    del plain[at : at + len(WITHOUT)]
    return [*plain, "--advantage-estimator", estimator, *ESTIMATORS[estimator], *more]


def rows(run, kind="train"):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_three_steps_of_each_leave_metrics_that_are_explained(inputs, tmp_path, estimator):
    run = tmp_path / "run"
    done = miles("train", *line(inputs, run, estimator))
    assert done.returncode == 0, done.stderr
    seen = rows(run)
    assert len(seen) == 3 and list_undocumented(seen[-1].keys() - {"kind", "step"}) == []
    for row in seen:
        assert row["advantage_mean"] == pytest.approx(0, abs=1e-5) and row["advantage_std"] == pytest.approx(
            1, abs=0.05
        )
        assert row["parity_max_abs"] < 1e-4 and "return_mean" in row
        assert ("reward_kl" in row) == (estimator != "reinforce_plus_plus_baseline") and "kl" not in row
        assert ("value_loss" in row) == (estimator == "ppo")
    last = run / "checkpoints" / "step-000003"
    assert (last / "critic" / "value_head.safetensors").exists() == (estimator == "ppo")
    if estimator == "ppo":
        assert "loss" not in seen[0] and seen[0]["explained_variance"] == pytest.approx(0, abs=1e-5)
        assert all("loss" in row for row in seen[1:])


def test_a_killed_run_with_a_critic_continues_to_the_bit(inputs, tmp_path):
    calm, run = tmp_path / "calm", tmp_path / "run"
    done = miles("train", *line(inputs, calm, "ppo", steps=5))
    assert done.returncode == 0, done.stderr
    # In the first step only the critic's optimizer moves, then both do, twice a step: this is the middle of the fourth.
    killed = miles("train", *line(inputs, run, "ppo", steps=5), kill_at="miles.train.optim.optimizer:Optimizer.step:12")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000002"]
    again = miles("train", *line(inputs, run, "ppo", steps=5))
    assert again.returncode == 0, again.stderr
    expected = everything(calm)
    assert {"critic/optimizer.safetensors", "critic/value_head.safetensors"} <= expected.keys()
    assert everything(run).keys() == expected.keys()
    for name, content in expected.items():
        assert everything(run)[name] == content, f"{name} differs"


def test_a_critic_of_another_run_is_taken_up_with_its_head(inputs, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert miles("train", *line(inputs, first, "ppo")).returncode == 0
    taken = first / "checkpoints" / "step-000003" / "critic"
    done = miles("train", *line(inputs, second, "ppo", "--critic-load", str(taken)))
    assert done.returncode == 0, done.stderr
    assert rows(first)[0]["value_mean"] == 0.0 != rows(second)[0]["value_mean"]


def test_planes_may_overlap_with_a_critic_too(inputs, tmp_path):
    done = miles("train", *line(inputs, tmp_path / "run", "ppo", "--max-weight-staleness", "1"))
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "run")) == 3
