"""Every algorithm that compares trajectories, and a user's own, through the front door."""

import json

import pytest
from tests.launch.small_run import flags, miles, write_inputs

from miles.observe.metric import list_undocumented

OWN = "tests.launch.custom_algorithm"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def trained(inputs, run, *more, without=()):
    done = miles("train", *(flag for flag in flags(inputs, run, *more, steps=3) if flag not in without))
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == "train"]


@pytest.mark.parametrize(
    "more",
    [
        "gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --use-opsm --opsm-delta 0.01",
        "cispo --eps-clip 1 --eps-clip-high 3",
        "rloo --overlong-buffer-len 3 --overlong-penalty-factor 0.5",
        "maxrl --use-unbiased-kl",
        "opo --disable-grpo-std-normalization --constant-loss-length 6",
    ],
    ids=lambda more: more.split()[0],
)
def test_an_algorithm_trains(inputs, tmp_path, more):
    rows = trained(inputs, tmp_path / "run", "--advantage-estimator", *more.split())
    assert len(rows) == 3
    for row in rows:
        assert row["grad_norm"] > 0 and row["advantage_std"] > 0 and row["parity_max_abs"] < 1e-4
        assert not list_undocumented(row.keys() - {"kind", "step", "version"})
    assert any(row["pg_clipfrac"] > 0 for row in rows) or "cispo" in more
    assert ("opsm_clipfrac" in rows[0]) == ("--use-opsm" in more)


def test_mathematics_of_ones_own_trains(inputs, tmp_path):
    rows = trained(
        inputs,
        tmp_path / "run",
        *("--custom-reward-post-process-path", f"{OWN}:best_of_all", "--loss-type", "custom_loss"),
        *("--custom-loss-function-path", f"{OWN}:likelihood", "--custom-pg-loss-reducer-function-path"),
        f"{OWN}:by_length",
        without=("--kl-loss-coef", "0.01"),
    )
    assert all(row["grad_norm"] > 0 and row["advantage_mean"] > 0 and "pg_loss" not in row for row in rows)


def test_rows_of_ones_own_are_what_is_trained_on(inputs, tmp_path):
    rows = trained(inputs, tmp_path / "run", "--custom-convert-samples-to-train-data-path", f"{OWN}:first_token_only")
    assert all(row["trained_tokens"] == 16 for row in rows)


def test_a_hook_that_does_not_fit_is_told_before_anything_starts(inputs, tmp_path):
    more = ("--custom-reward-post-process-path", f"{OWN}:likelihood")
    done = miles("train", *flags(inputs, tmp_path / "run", *more))
    assert done.returncode == 1
    assert "but AdvantageFn wants def (group: Group) -> Sequence[float]" in done.stderr
