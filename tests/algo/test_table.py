"""What each name on the command line stands for."""

from pathlib import Path

import pytest

from miles.algo.config import AlgoConfig
from miles.algo.kl import k2
from miles.algo.mask import OffPolicySequences
from miles.algo.objective import Clip, PolicyLoss, SupervisedLoss, clipped_surrogate, weighted_likelihood
from miles.algo.ratio import sequence_ratio, token_ratio
from miles.algo.reduce import Constant, per_token, per_trajectory
from miles.algo.table import ALGORITHMS, DIVERGENCES, Plugs, mean_of, objective_of, reducer_of, rows
from miles.core.errors import UsageError


def test_the_table_follows_the_knobs_and_every_row_is_documented():
    found = objective_of(AlgoConfig(eps_clip=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2"))
    assert isinstance(found, PolicyLoss)
    assert found.clip == Clip(low=0.1, high=0.1) and found.divergence is k2 and found.kl_coef == 0.5
    assert found.mask is None and found.correction is None and not found.unbiased_kl
    unused = objective_of(AlgoConfig(kl_loss_coef=0.5))
    assert isinstance(unused, PolicyLoss) and unused.kl_coef == 0.0
    masked = objective_of(AlgoConfig(use_opsm=True, opsm_delta=0.3, use_unbiased_kl=True))
    assert isinstance(masked, PolicyLoss) and masked.mask == OffPolicySequences(delta=0.3) and masked.unbiased_kl
    assert isinstance(objective_of(AlgoConfig(loss_type="sft_loss")), SupervisedLoss)
    assert all(len(docs) > 40 for _, _, docs in rows())


def test_the_estimator_sets_the_ratio_and_the_surrogate():
    assert set(ALGORITHMS) == set(AlgoConfig.__annotations__["advantage_estimator"].__args__)
    for name in ALGORITHMS:
        found = objective_of(AlgoConfig(advantage_estimator=name))
        assert isinstance(found, PolicyLoss)
        assert found.ratio is (sequence_ratio if name == "gspo" else token_ratio)
        assert found.surrogate is (weighted_likelihood if name == "cispo" else clipped_surrogate)


def test_reducers_follow_the_knobs_and_metrics_stay_means():
    assert reducer_of(AlgoConfig(calculate_per_token_loss=True)) is per_token
    assert reducer_of(AlgoConfig()) is per_trajectory
    constant = AlgoConfig(constant_loss_length=64)
    assert reducer_of(constant) == Constant(length=64) and mean_of(constant) is per_trajectory


def test_a_users_own_parts_take_the_place_of_ours():
    def own(*_):
        raise AssertionError("never called here")

    assert objective_of(AlgoConfig(loss_type="custom_loss"), Plugs(objective=own)) is own
    assert reducer_of(AlgoConfig(), Plugs(reducer=own)) is own
    found = objective_of(AlgoConfig(use_tis=True), Plugs(correction=own))
    assert isinstance(found, PolicyLoss) and found.correction is own


def test_every_name_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert not [name for name in (*ALGORITHMS, *DIVERGENCES) if f"`{name}`" not in page]


def test_a_dual_clip_that_would_bite_at_once_is_refused():
    with pytest.raises(UsageError, match="--eps-clip-c"):
        objective_of(AlgoConfig(eps_clip_c=1.0))
