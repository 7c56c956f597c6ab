import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import UsageError
from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import LRSchedule, build_critic_lr_schedule, build_lr_schedule


def test_constant_with_warm_up():
    s = LRSchedule(style="constant", lr=2.0, min_lr=0.0, warmup=4, decay=10)
    assert [s.at(u) for u in (1, 2, 4, 5, 50)] == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_cosine_by_hand():
    s = LRSchedule(style="cosine", lr=1.0, min_lr=0.1, warmup=0, decay=8)
    assert [s.at(u) for u in (2, 4, 6, 8, 9)] == pytest.approx(
        [0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.55, 0.1 + 0.9 * (1 - math.cos(math.pi / 4)) / 2, 0.1, 0.1]
    )


def test_a_decay_without_a_length_lasts_the_whole_run_and_the_warm_up_may_be_a_fraction():
    found = build_lr_schedule(TrainConfig(lr_decay_style="linear", lr_warmup_fraction=0.1, lr=1.0), updates=200)
    assert (found.warmup, found.decay) == (20, 200)
    assert found.at(20) == 1.0 and found.at(110) == pytest.approx(0.5) and found.at(200) == 0.0


@pytest.mark.parametrize(
    "knobs",
    [
        {"lr_warmup_iters": 3, "lr_warmup_fraction": 0.1},
        {"lr_decay_style": "cosine", "lr_warmup_iters": 30},
    ],
)
def test_contradictory_schedules_are_refused(knobs):
    with pytest.raises(UsageError, match="--lr-warmup-iters"):
        build_lr_schedule(TrainConfig(**knobs), updates=30)


def test_a_critic_has_a_rate_and_a_warm_up_of_its_own_and_the_policys_when_not_given():
    own = {"critic_lr": 3.0, "critic_lr_warmup_iters": 2}
    found = build_critic_lr_schedule(TrainConfig(lr_warmup_fraction=0.5, lr_decay_style="linear", **own), updates=12)
    assert (found.lr, found.warmup, found.decay, found.style) == (3.0, 2, 12, "linear")
    assert build_critic_lr_schedule(TrainConfig(lr=1.0), updates=9) == build_lr_schedule(TrainConfig(lr=1.0), updates=9)
    with pytest.raises(UsageError, match="--critic-lr-warmup-iters"):
        build_critic_lr_schedule(TrainConfig(lr_decay_style="cosine", critic_lr_warmup_iters=30), updates=30)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 50), st.floats(0, 0.5))
def test_a_rate_rises_to_its_peak_at_the_end_of_the_warm_up_and_never_rises_again(style, warmup, length, low):
    s = LRSchedule(style=style, lr=1.0, min_lr=low, warmup=warmup, decay=warmup + length)
    rates = [s.at(u) for u in range(1, warmup + length + 5)]
    assert all(0 < r <= 1.0 for r in rates[:warmup]) and rates[:warmup] == sorted(rates[:warmup])
    assert all(a >= b - 1e-12 and b >= low - 1e-12 for a, b in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
