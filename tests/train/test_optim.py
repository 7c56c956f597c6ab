import math

import pytest
import torch

from miles.core.errors import CheckpointError
from miles.train.config import TrainConfig
from miles.train.optim import GradientError, Optimizer
from miles.train.rates import schedule_of

SHAPES = {"matrix": (4, 3), "norm": (3,), "experts": (2, 3, 3)}


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in SHAPES.items()}


def give(params, seed, scale=1.0):
    torch.manual_seed(seed)
    for p in params.values():
        (p * (scale * torch.randn(p.shape).to(p.dtype))).sum().backward()


def build(params, updates=10, **knobs):
    config = TrainConfig(**({"lr": 1e-2, "weight_decay": 0.1} | knobs))
    return Optimizer(params, config, schedule_of(config, updates=updates))


def test_float32_updates_equal_torch_adamw_to_the_bit_and_norms_are_not_decayed():
    mine, theirs = parameters(), parameters()
    optimizer = build(mine, clip_grad=0.0, adam_beta2=0.98)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["matrix"], theirs["experts"]], "weight_decay": 0.1},
            {"params": [theirs["norm"]], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.98),
        eps=1e-8,
    )
    for seed in range(5):
        give(mine, seed)
        give(theirs, seed)
        optimizer.step()
        reference.step()
        reference.zero_grad()
        assert all(torch.equal(mine[n], theirs[n]) for n in SHAPES)
        assert all(p.grad is None for p in mine.values())


def test_a_gradient_longer_than_allowed_is_scaled_and_its_own_norm_reported():
    long, short = parameters(), parameters()
    give(long, 1, scale=100.0)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in long.values() if p.grad is not None))
    for p, q in zip(short.values(), long.values(), strict=True):
        p.grad = q.grad / norm  # type: ignore[operator]
    reported, _ = build(long).step()
    assert reported == pytest.approx(norm, rel=1e-6)
    build(short, clip_grad=0.0).step()
    assert all(torch.allclose(long[n], short[n], atol=1e-6) for n in SHAPES)


def test_low_precision_parameters_are_roundings_of_masters_that_feel_small_updates():
    params = parameters(torch.bfloat16)
    optimizer = build(params, lr=1e-5, weight_decay=0.0)
    before = {n: p.detach().clone() for n, p in params.items()}
    exact = {n: p.detach().float().clone().requires_grad_() for n, p in params.items()}
    reference = torch.optim.AdamW(list(exact.values()), lr=1e-5, weight_decay=0.0)
    for _ in range(30):
        for p, q in zip(params.values(), exact.values(), strict=True):
            p.sum().backward()
            q.grad = torch.ones_like(q)
        optimizer.step()
        reference.step()
    assert any(not torch.equal(params[n], before[n]) for n in SHAPES)
    assert all(torch.equal(params[n], exact[n].detach().to(torch.bfloat16)) for n in SHAPES)


def test_gradients_of_micro_batches_are_added_up_in_float32():
    params = {"matrix": torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)}
    optimizer = build(params, clip_grad=0.0)
    for size in (256.0, 1.0, 1.0):  # bfloat16 would lose both ones
        (params["matrix"] * size).sum().backward()
    norm, _ = optimizer.step()
    assert norm == 258.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_refused_by_name_and_changes_nothing(bad):
    params = parameters()
    optimizer = build(params)
    before = {n: p.detach().clone() for n, p in params.items()}
    give(params, 0)
    assert params["norm"].grad is not None
    params["norm"].grad[1] = bad
    with pytest.raises(GradientError, match=r"optimizer step 1.*first at norm"):
        optimizer.step()
    assert all(torch.equal(params[n], before[n]) for n in SHAPES) and optimizer.updates == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_as_if_it_had_not_stopped(dtype):
    def run(params, optimizer, seeds):
        for seed in seeds:
            give(params, seed)
            optimizer.step()

    straight = parameters(dtype)
    one = build(straight, lr_decay_style="cosine")
    run(straight, one, range(3))
    state = {name: value.clone() for name, value in one.state().items()}
    resumed = {n: p.detach().clone().requires_grad_() for n, p in straight.items()}
    two = build(resumed, lr_decay_style="cosine")
    two.load(state, updates=3)
    run(straight, one, range(3, 6))
    run(resumed, two, range(3, 6))
    assert all(torch.equal(straight[n], resumed[n]) for n in SHAPES)
    assert all(torch.equal(one.state()[n], value) for n, value in two.state().items())


def test_state_of_another_model_is_refused():
    params = parameters()
    optimizer = build(params)
    give(params, 0)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"exp_avg\.other"):
        optimizer.load(optimizer.state() | {"exp_avg.other": torch.zeros(1)}, updates=1)
    with pytest.raises(CheckpointError, match=r"exp_avg\.matrix has shape"):
        optimizer.load(optimizer.state() | {"exp_avg.matrix": torch.zeros(1)}, updates=1)


def test_moving_the_state_changes_no_number():
    params = parameters(torch.bfloat16)
    optimizer = build(params)
    give(params, 0)
    optimizer.step()
    before = {n: v.clone() for n, v in optimizer.state().items()}
    optimizer.move(torch.device("cpu"))
    assert all(torch.equal(before[n], v) for n, v in optimizer.state().items())
