"""Hand numbers, the divergences they estimate by enumeration, sums that split anyhow; and the ladder of ``auto``."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.algo.config import AlgoConfig
from miles.algo.correction_schedule import (
    DEFAULT_BOUNDS,
    CorrectionSchedule,
    LogprobGap,
    RatioBounds,
    build_correction_schedule,
    resolve_bounds,
    uses_correction,
)
from miles.algo.logprob_mismatch import effective_sample_size, mismatch_metrics, sum_mismatch
from miles.algo.loss_aggregation import WeightedAggregator

R = torch.float64
SAMPLES = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), min_size=1, max_size=6)


def layout(lengths):
    trained = torch.tensor(lengths)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), trained)
    return WeightedAggregator(weight_R=torch.ones(int(trained.sum()), dtype=R), sample_R=sample, trained_S=trained)


def totals(samples, *, counted=None):
    """Sums and largest values of samples of gaps (engine - trainer)."""
    gap = torch.tensor([x for s in samples for x in s], dtype=R)
    kept = [True] * len(samples) if counted is None else counted
    reported = torch.tensor([k for k, s in zip(kept, samples, strict=True) for _ in s])
    found = sum_mismatch(gap - 1.0, torch.full_like(gap, -1.0), reported, layout([len(s) for s in samples]))
    return {name: float(value) for name, value in (found.sums | found.maxima).items()}


def test_two_samples_by_hand():
    found = mismatch_metrics(totals([[math.log(2), -math.log(2)], [math.log(4)]]))
    assert found == pytest.approx(
        {
            "mean_abs": math.log(16) / 3,
            "max_abs": math.log(4),
            "k1": math.log(4) / 3,
            # exp(-d) + d - 1 of ln 2, -ln 2 and ln 4
            "k3": ((0.5 + math.log(2) - 1) + (2 - math.log(2) - 1) + (0.25 + math.log(4) - 1)) / 3,
            # the first sample's gaps cancel, the second's trainer is four times as perplexed
            "ppl_ratio": (1 + 4) / 2,
            # weights 1/2, 2 and 1/4
            "ess": 2.75**2 / (3 * (0.25 + 4 + 0.0625)),
            "tokens": 3,
        }
    )


def test_where_the_two_agree_there_is_no_mismatch_at_all():
    found = mismatch_metrics(totals([[0.0, 0.0], [0.0]]))
    assert found == {"mean_abs": 0, "max_abs": 0, "k1": 0, "k3": 0, "ppl_ratio": 1, "ess": 1, "tokens": 3}


def test_both_estimators_give_the_divergence_of_engine_and_trainer():
    torch.manual_seed(0)
    engine, trainer = (torch.log_softmax(torch.randn(50, dtype=R), -1) for _ in range(2))
    true = float((engine.exp() * (engine - trainer)).sum())
    for name in ("k1", "k3"):
        each = [sum_mismatch(engine[i, None], trainer[i, None], torch.tensor([True]), layout([1])) for i in range(50)]
        mean = (engine.exp() * torch.stack([found.sums[name] for found in each])).sum()
        assert float(mean) == pytest.approx(true)


def test_a_gap_of_a_rounding_error_is_not_lost_in_its_square():
    engine = torch.tensor([-1.0, -2.0])
    found = sum_mismatch(engine, engine - 2**-20, torch.tensor([True, True]), layout([2]))
    assert float(found.sums["k3"]) == pytest.approx(2 * 2**-41, rel=1e-4)


@given(SAMPLES, st.data())
def test_parts_add_up_however_the_samples_are_distributed_out(samples, data):
    whole = totals(samples)
    order = data.draw(st.permutations(range(len(samples))))
    cut = data.draw(st.integers(0, len(samples)))
    parts = [totals([samples[i] for i in part]) for part in (order[:cut], order[cut:]) if part]
    added = {name: sum(p[name] for p in parts) for name in whole} | {"max_abs": max(p["max_abs"] for p in parts)}
    assert mismatch_metrics(added) == pytest.approx(mismatch_metrics(whole), rel=1e-9, abs=1e-12)


@given(SAMPLES, st.lists(st.floats(-3, 3), min_size=1, max_size=4))
def test_a_sample_that_does_not_count_changes_nothing(samples, other):
    alone = mismatch_metrics(totals(samples))
    among = mismatch_metrics(totals([*samples, other], counted=[True] * len(samples) + [False]))
    assert among == pytest.approx(alone)
    assert alone["k3"] >= 0 and 0 < alone["ess"] <= 1 + 1e-12


def test_nothing_compared_is_nothing_found():
    assert mismatch_metrics({}) == {} and mismatch_metrics(totals([[1.0]], counted=[False])) == {}


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9))
def test_the_effective_size_lies_between_one_of_them_and_all(weights):
    size = effective_sample_size(sum(weights), sum(w * w for w in weights), len(weights))
    if any(w > 1e-6 for w in weights):
        assert 1 / len(weights) - 1e-9 <= size <= 1 + 1e-9
    assert effective_sample_size(0.0, 0.0, 3.0) == 0


# -- the ladder -----------------------------------------------------------------------------

LADDER = CorrectionSchedule(tolerance=0.01, stop=0.1)
HIGHER = {"none": 0, "truncate": 1, "icepop": 2, "stop": 3}


@pytest.mark.parametrize(
    ("mean", "largest", "rung"),
    [
        (0.0, 0.0, "none"),
        (0.001, 0.69, "none"),
        (math.nextafter(0.001, 1), 0.69, "truncate"),
        (0.0005, 0.7, "truncate"),  # one token twice as likely to one as to the other
        (0.01, 9.0, "truncate"),
        (math.nextafter(0.01, 1), 0.1, "icepop"),
        (0.1, 0.1, "icepop"),
        (math.nextafter(0.1, 1), 0.2, "stop"),
        (math.nan, math.nan, "stop"),
        (0.0, math.nan, "truncate"),
        (math.inf, math.inf, "stop"),
    ],
)
def test_the_light_chooses_the_rung(mean, largest, rung):
    assert LADDER.choose(LogprobGap(mean_abs=mean, max_abs=largest)) == rung


def test_what_older_weights_wrote_is_weighed_whatever_the_parity():
    assert LADDER.choose(None, stale=True) == "truncate"
    assert LADDER.choose(LogprobGap(mean_abs=0.0, max_abs=0.0), stale=True) == "truncate"
    assert LADDER.choose(LogprobGap(mean_abs=0.05, max_abs=0.1), stale=True) == "icepop"
    assert LADDER.choose(None) == "none"  # nothing is trained at all


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 5))
def test_a_wider_gap_never_leads_to_a_lower_rung(a, b, largest):
    low, high = sorted((a, b))
    first, second = (LADDER.choose(LogprobGap(mean_abs=m, max_abs=largest)) for m in (low, high))
    assert HIGHER[first] <= HIGHER[second]


def test_the_last_rung_is_where_it_was_told_or_a_decade_above_the_tolerance():
    assert build_correction_schedule(tolerance=0.02, stop=0.05) == CorrectionSchedule(tolerance=0.02, stop=0.05)
    assert build_correction_schedule(tolerance=0.02, stop=None).stop == pytest.approx(0.2)


def test_bounds_are_the_modes_own_unless_told():
    assert (
        resolve_bounds(AlgoConfig(), "truncate") == RatioBounds(low=0, high=2) == resolve_bounds(AlgoConfig(), "mask")
    )
    assert resolve_bounds(AlgoConfig(), "icepop") == RatioBounds(low=0.5, high=5) == DEFAULT_BOUNDS["icepop"]
    assert resolve_bounds(AlgoConfig(tis_clip=3.0), "icepop") == RatioBounds(low=0.5, high=3)
    assert resolve_bounds(AlgoConfig(tis_clip_low=0.1), "truncate") == RatioBounds(low=0.1, high=2)
    with pytest.raises(AssertionError):
        RatioBounds(low=1.1, high=2)


def test_what_counts_as_correcting():
    assert not uses_correction(AlgoConfig())
    assert uses_correction(AlgoConfig(use_tis=True)) and uses_correction(AlgoConfig(use_rs=True))
    assert uses_correction(AlgoConfig(rs_veto_threshold=1e-4))
