"""Whole runs with an engine that is not quite the trainer: what is measured, what is done, and when a run stops."""

import json

import pytest
import torch
from tests.launch.small_run import flags, write_inputs

from miles.algo.loss_aggregation import LossAggregator
from miles.algo.policy_loss import LossInputs, TokenWeights
from miles.backends.native.runner import model_runner
from miles.launch.main import main
from miles.observe.metric import list_undocumented

STEPS = 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def sharper(monkeypatch):
    """Makes the engine's logits larger than the trainer's by a factor."""
    right = model_runner.compute_logits

    def become(factor):
        monkeypatch.setattr(model_runner, "compute_logits", lambda *args, **how: right(*args, **how) * factor)

    return become


def trained(inputs, run, *more):
    assert main(["train", *flags(inputs, run, *more, steps=STEPS)]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert len(rows) == STEPS
    assert not list_undocumented(name for row in rows for name in row if name not in ("kind", "step"))
    return rows


def test_an_engine_of_its_own_mind_is_measured_and_corrected(inputs, tmp_path, sharper, capsys):
    sharper(1.5)
    plain = trained(inputs, tmp_path / "plain")
    assert all("tis" not in row and row["parity_ess"] < 0.999 and row["parity_k3"] > 1e-3 for row in plain)
    more = ("--use-tis", "--tis-clip", "1.1", "--tis-clip-low", "0.9", "--tis-batch-normalize")
    rows = trained(inputs, tmp_path / "tis", *more)
    for row in rows:
        assert 0.9 <= row["tis_weight"] <= 1.1 and 0 < row["tis_clipfrac"] < 1
        assert row["parity_ess"] < row["tis_ess"] <= 1
    assert rows[0]["parity_mean_abs"] == plain[0]["parity_mean_abs"] and rows[0]["grad_norm"] != plain[0]["grad_norm"]
    dropped = ("--use-tis", "--tis-mode", "mask", "--tis-level", "geometric", "--tis-clip", "1.05", "--use-rs")
    rows = trained(inputs, tmp_path / "mis", *dropped, "--rs-veto-threshold", "0.5")
    assert all(row["tis_maskfrac"] > 0 and "rs_maskfrac" in row and "rs_vetofrac" in row for row in rows)
    assert "worst parity" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "rung"), [(1.0, 0), (1.02, 1), (1.2, 2)])
def test_the_light_picks_the_correction(inputs, tmp_path, sharper, factor, rung):
    sharper(factor)
    first, *_ = trained(inputs, tmp_path / "run", "--use-tis", "--tis-mode", "auto", "--parity-stop", "1")
    assert first["tis_auto_mode"] == rung, first["parity_mean_abs"]
    assert ("tis_clipfrac" in first, "tis_maskfrac" in first) == (rung == 1, rung == 2)


def test_an_engine_too_far_off_stops_the_run_before_it_learns(inputs, tmp_path, sharper, capsys):
    sharper(4.0)
    more = ("--use-tis", "--tis-mode", "auto")
    assert main(["train", *flags(inputs, tmp_path / "run", *more, steps=STEPS)]) != 0
    said = capsys.readouterr().err
    assert "above --parity-stop 0.1; the weights were not changed" in said


def halve(evidence: LossInputs, layout: LossAggregator) -> TokenWeights:
    """A correction such as a user would bring."""
    weight_R = torch.full_like(evidence.old_logp_R, 0.5)
    return TokenWeights(weight_R=weight_R, metrics={"tis_weight": layout.mean(weight_R)})


def test_a_correction_of_ones_own_is_loaded_and_used(inputs, tmp_path):
    path = "tests.launch.test_mismatch_runs:halve"
    rows = trained(inputs, tmp_path / "run", "--use-tis", "--custom-tis-function-path", path)
    assert all(row["tis_weight"] == pytest.approx(0.5) for row in rows)


def test_a_plan_says_what_a_token_weighs(inputs, tmp_path, capsys):
    more = ("--use-tis", "--tis-mode", "icepop", "--rs-veto-threshold", "1e-4")
    assert main(["plan", *flags(inputs, tmp_path / "run", *more)]) == 0
    said = capsys.readouterr().out
    assert "w = π_old/π_engine within [0.5, 5] and else 0" in said and "below 0.0001" in said
