"""What each name on the command line stands for."""

from pathlib import Path

import pytest

from miles.algo.config import AlgoConfig
from miles.algo.loss_aggregation import ConstantLengthReducer, mean_per_token, mean_per_trajectory
from miles.algo.policy_loss import (
    ClipRange,
    OffPolicySequenceMask,
    PolicyLoss,
    SFTLoss,
    cispo_loss,
    gspo_ratio,
    k2,
    ppo_clip_loss,
    token_ratio,
)
from miles.algo.registry import (
    ALGORITHMS,
    KL_ESTIMATORS,
    AlgoHooks,
    build_loss,
    build_reducer,
    iter_registry,
    select_metric_reducer,
)
from miles.core.errors import UsageError


def test_the_table_follows_the_knobs_and_every_row_is_documented():
    found = build_loss(AlgoConfig(eps_clip=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2"))
    assert isinstance(found, PolicyLoss)
    assert found.clip == ClipRange(low=0.1, high=0.1) and found.kl_estimator is k2 and found.kl_coef == 0.5
    assert found.mask is None and found.correction is None and not found.unbiased_kl
    unused = build_loss(AlgoConfig(kl_loss_coef=0.5))
    assert isinstance(unused, PolicyLoss) and unused.kl_coef == 0.0
    masked = build_loss(AlgoConfig(use_opsm=True, opsm_delta=0.3, use_unbiased_kl=True))
    assert isinstance(masked, PolicyLoss) and masked.mask == OffPolicySequenceMask(delta=0.3) and masked.unbiased_kl
    assert isinstance(build_loss(AlgoConfig(loss_type="sft_loss")), SFTLoss)
    assert all(len(docs) > 40 for _, _, docs in iter_registry())


def test_the_estimator_sets_the_ratio_and_the_surrogate():
    assert set(ALGORITHMS) == set(AlgoConfig.__annotations__["advantage_estimator"].__args__)
    for name in ALGORITHMS:
        found = build_loss(AlgoConfig(advantage_estimator=name))
        assert isinstance(found, PolicyLoss)
        assert found.ratio is (gspo_ratio if name == "gspo" else token_ratio)
        assert found.surrogate is (cispo_loss if name == "cispo" else ppo_clip_loss)


def test_reducers_follow_the_knobs_and_metrics_stay_means():
    assert build_reducer(AlgoConfig(calculate_per_token_loss=True)) is mean_per_token
    assert build_reducer(AlgoConfig()) is mean_per_trajectory
    constant = AlgoConfig(constant_loss_length=64)
    assert (
        build_reducer(constant) == ConstantLengthReducer(length=64)
        and select_metric_reducer(constant) is mean_per_trajectory
    )


def test_a_users_own_parts_take_the_place_of_ours():
    def own(*_):
        raise AssertionError("never called here")

    assert build_loss(AlgoConfig(loss_type="custom_loss"), AlgoHooks(loss_fn=own)) is own
    assert build_reducer(AlgoConfig(), AlgoHooks(reducer=own)) is own
    found = build_loss(AlgoConfig(use_tis=True), AlgoHooks(correction=own))
    assert isinstance(found, PolicyLoss) and found.correction is own


def test_every_name_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert not [name for name in (*ALGORITHMS, *KL_ESTIMATORS) if f"`{name}`" not in page]


def test_a_dual_clip_that_would_bite_at_once_is_refused():
    with pytest.raises(UsageError, match="--eps-clip-c"):
        build_loss(AlgoConfig(eps_clip_c=1.0))
