"""The verdict on a run: learning, flat, worse; each check turns at its threshold."""

from pathlib import Path
from statistics import fmean, variance

import numpy as np
import pytest
from tests.observe.dashboard.example_runs import append_steps, write_config

from miles.observe.dashboard.health import assess_run, judge_learning, measure_gain, measure_trend
from miles.observe.dashboard.run_reader import RunReader
from miles.observe.event_records import encode_line


def make_run(folder: Path, rewards: list[float], **columns: float) -> RunReader:
    write_config(folder)
    for step, reward in enumerate(rewards, 1):
        append_steps(folder, step, step, reward=reward, **columns)
    run = RunReader("run", folder)
    run.update()
    return run


def noisy(values: np.ndarray) -> list[float]:
    return (values + np.random.default_rng(0).normal(0, 0.02, len(values))).tolist()


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([0.1] * 5, "too early"),
        (noisy(np.linspace(0, 1, 100)), "learning"),
        (noisy(np.minimum(np.linspace(0, 4, 100), 1)), "learned, now flat"),
        (noisy(np.full(100, 0.5)), "not learning"),
        (noisy(np.linspace(1, 0, 100)), "getting worse"),
        (noisy(1 - np.abs(np.linspace(-1, 0.6, 100))), "falling again"),
    ],
)
def test_the_verdict_follows_the_reward(tmp_path: Path, rewards: list[float], verdict: str):
    assert judge_learning(make_run(tmp_path, rewards))[0] == verdict


def test_the_error_of_a_gain_is_that_of_two_means():
    values = np.random.default_rng(1).normal(0, 1, 200).tolist()
    gain, error = measure_gain(np.array(values))
    assert gain == pytest.approx(fmean(values[-20:]) - fmean(values[:20]))
    assert error**2 == pytest.approx((variance(values[-20:]) + variance(values[:20])) / 20)


def test_a_trend_is_the_least_squares_line_of_the_newest_quarter():
    values = np.random.default_rng(2).normal(0, 1, 400)
    change, error = measure_trend(values)
    (slope, _), covariance = np.polyfit(np.linspace(0, 1, 100), values[-100:], 1, cov=True)
    assert change == pytest.approx(slope)
    assert error == pytest.approx(covariance[0, 0] ** 0.5)


@pytest.mark.parametrize(
    ("metric", "value", "check", "level"),
    [
        ("zero_std_ratio", 0.4, "groups with equal rewards", "ok"),
        ("zero_std_ratio", 0.95, "groups with equal rewards", "bad"),
        ("truncated_ratio", 0.2, "truncated responses", "warn"),
        ("unscored_ratio", 0.3, "trajectories without a reward", "bad"),
        ("parity_mean_abs", 1e-5, "parity of engine and trainer", "ok"),
        ("parity_mean_abs", 2e-3, "parity of engine and trainer", "warn"),
        ("parity_mean_abs", float("nan"), "parity of engine and trainer", "bad"),
        ("staleness", 1.0, "staleness", "bad"),
        ("grad_norm", float("nan"), "finite gradients", "bad"),
        ("kl", 2.0, "KL from the reference", "warn"),
    ],
)
def test_a_check_turns_at_its_threshold(tmp_path: Path, metric: str, value: float, check: str, level: str):
    run = make_run(tmp_path, [0.5] * 12, **{metric: value})
    found = {each["name"]: each for each in assess_run(run, 0.01)["checks"]}
    assert found[check]["level"] == level
    assert found[check]["cure"] and found[check]["threshold"]


def test_equal_rewards_are_no_fault_of_a_run_that_has_solved_its_prompts(tmp_path: Path):
    run = make_run(tmp_path, [0.2] * 10 + [1.0] * 20, zero_std_ratio=1.0, reward_min=0.0, reward_max=1.0)
    found = {each["name"]: each for each in assess_run(run, 0.01)["checks"]}
    assert found["groups with equal rewards"]["level"] == "warn"


def test_entropy_that_is_gone_is_red(tmp_path: Path):
    write_config(tmp_path)
    append_steps(tmp_path, 1, 10, entropy=1.0)
    append_steps(tmp_path, 11, 40, entropy=0.001)
    run = RunReader("run", tmp_path)
    run.update()
    found = {each["name"]: each for each in assess_run(run, 0.01)["checks"]}
    assert found["entropy"]["level"] == "bad"


def test_stalls_restarts_and_failed_saves_are_counted(tmp_path: Path):
    run = make_run(tmp_path, [0.5] * 12)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "stall-1.txt").write_text("stacks")
    events = [{"event": "RunStarted", "step": 0, "steps": 20, "time": 1.0}] * 2 + [{"event": "SaveFailed", "step": 3}]
    (tmp_path / "logs" / "sessions.jsonl").write_bytes(b"".join(map(encode_line, events)))
    run.update()
    found = {each["name"]: each for each in assess_run(run, 0.01)["checks"]}
    assert (found["stalls"]["level"], found["stalls"]["value"]) == ("warn", "1 stack dump")
    assert (found["restarts"]["level"], found["restarts"]["value"]) == ("bad", "1 restarts, 1 failed saves")


def test_every_page_that_a_check_names_exists(tmp_path: Path):
    docs = Path(__file__).parents[3] / "docs"
    columns = ("zero_std_ratio", "truncated_ratio", "unscored_ratio", "failed_ratio", "pg_clipfrac", "entropy", "kl")
    run = make_run(tmp_path, [0.5] * 12, **dict.fromkeys((*columns, "parity_mean_abs", "staleness", "loss"), 0.5))
    pages = {each["page"].partition("#")[0] for each in assess_run(run, 0.01)["checks"]}
    assert len(pages) > 4 and not [page for page in pages if not (docs / page).is_file()]
