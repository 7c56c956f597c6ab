import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples
from tests.train.small_trainer import model, ragged, step, weights, worker

from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import Optimizer
from miles.train.optim.quantized_state import (
    BLOCK,
    MIN_QUANTIZED_NUMEL,
    BFloat16State,
    Float32State,
    Int8State,
    make_random_fn,
)

CPU = torch.device("cpu")
FORMS = {
    "float32": Float32State(),
    "first of bfloat16": BFloat16State(stochastic=False),
    "second of bfloat16": BFloat16State(stochastic=True),
    "first of int8": Int8State(signed=True),
    "second of int8": Int8State(signed=False),
}


def numbers(form, seed, count=3 * BLOCK + 17):
    """Of many sizes, some of them zero."""
    torch.manual_seed(seed)
    values = torch.randn(count).sign() * torch.exp2(-12 * torch.rand(count))
    values[torch.rand(count) < 0.05] = 0
    return values if form in (FORMS["float32"], FORMS["first of bfloat16"], FORMS["first of int8"]) else values.square()


def held(form, values, chance=None):
    raw = form.zeros(len(values), CPU, pinned=False)
    form.encode(raw, values, chance)
    return raw


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1000), drawn=st.booleans())
def test_what_is_read_is_written_again_to_the_bit(form, seed, drawn):
    raw = held(form, numbers(form, seed), make_random_fn(seed, CPU) if drawn else None)
    once = form.decode(raw).clone()
    again = held(form, once)
    assert torch.equal(form.decode(again), once)
    assert all(torch.equal(a, b) for a, b in zip(raw, again, strict=True))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1000), drawn=st.booleans())
def test_numbers_keep_their_size_sign_and_zeros(form, seed, drawn):
    values = numbers(form, seed)
    got = form.decode(held(form, values, make_random_fn(seed, CPU) if drawn else None))
    # A code is a power of 2^(1/8): drawn, the next one; else the nearer one.
    error = (got - values).abs()
    assert (error <= values.abs() * (0.0906 if drawn else 0.0453)).all()
    assert ((got == 0) == (values == 0)).all() and (got.sign() == values.sign()).all()


@pytest.mark.parametrize(
    "form", [f for n, f in FORMS.items() if n != "first of bfloat16"], ids=lambda f: type(f).__name__
)
def test_rounding_by_chance_is_right_on_average(form):
    values = numbers(form, 3)
    total = sum(form.decode(held(form, values, make_random_fn(seed, CPU))) for seed in range(400)) / 400
    assert torch.allclose(total, values, rtol=0.012, atol=0)


def test_second_moments_far_below_the_largest_are_rounded_up_and_never_to_zero():
    values = torch.full((BLOCK,), 1e-30)
    values[0] = 1.0
    got = Int8State(signed=False).decode(held(Int8State(signed=False), values, make_random_fn(0, CPU)))
    assert (got[1:] > 0).all() and got[1:].max() <= 2.0**-31
    # A first moment as far down may be, as then the update is no longer than that of the largest.
    got = Int8State(signed=True).decode(held(Int8State(signed=True), values))
    assert (got[1:] == 0).all()


@pytest.mark.parametrize("form", [FORMS["second of bfloat16"], FORMS["second of int8"]], ids=["bfloat16", "int8"])
def test_a_second_moment_falls_by_a_thousandth_a_step(form):
    """To the nearest it would stay where it is for ever."""
    raw = held(form, torch.ones(MIN_QUANTIZED_NUMEL))
    stuck = held(form, torch.ones(MIN_QUANTIZED_NUMEL))
    for number in range(300):
        form.encode(raw, form.decode(raw) * 0.999, make_random_fn(number, CPU))
        form.encode(stuck, form.decode(stuck) * 0.999, None)
    assert form.decode(raw).mean() == pytest.approx(0.999**300, rel=0.02)
    if isinstance(form, BFloat16State):
        assert torch.equal(form.decode(stuck), torch.ones(MIN_QUANTIZED_NUMEL))


def optimizer_of(params, **knobs):
    config = TrainConfig(lr=1e-3, **knobs)
    return Optimizer(params, config, build_lr_schedule(config, updates=9))


@pytest.mark.parametrize(("dtype", "each"), [("float32", 8.0), ("bfloat16", 4.0), ("int8", 2.0 + 8 / BLOCK)])
@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16])
def test_moments_take_as_many_bytes_as_promised(dtype, each, parameter):
    params = {"matrix": torch.randn(64, 256).to(parameter).requires_grad_(), "norm": torch.ones(64, requires_grad=True)}
    optimizer = optimizer_of(params, optimizer_state_dtype=dtype)
    sum(p.float().square().sum() for p in params.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    masters = 4 * 64 * 256 if parameter is torch.bfloat16 else 0
    small = 64 * (4.0 if dtype == "bfloat16" else 8.0)
    assert optimizer.bytes == 64 * 256 * each + small + masters


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("hosted", [False, True], ids=["here", "hosted"])
def test_a_restored_optimizer_of_few_bits_goes_on_as_if_it_had_not_stopped(dtype, hosted, monkeypatch):
    monkeypatch.setattr("miles.train.optim.adam._SLICE", 2 * BLOCK)
    how = {"optimizer_state_dtype": dtype, "optimizer_cpu_offload": hosted}

    def run(params, optimizer, seeds):
        for seed in seeds:
            torch.manual_seed(seed)
            for p in params.values():
                (p * torch.randn(p.shape).to(p.dtype)).sum().backward()
            optimizer.step()

    torch.manual_seed(9)
    straight = {"a": torch.randn(40, 256).bfloat16().requires_grad_(), "b": torch.randn(70, 71).requires_grad_()}
    one = optimizer_of(straight, **how)
    run(straight, one, range(3))
    state = {name: value.clone() for name, value in one.state().items()}
    assert all(state[f"exp_avg.{n}"].shape == p.shape for n, p in straight.items())
    resumed = {n: p.detach().clone().requires_grad_() for n, p in straight.items()}
    two = optimizer_of(resumed, **how)
    two.load(state, updates=3)
    run(straight, one, range(3, 6))
    run(resumed, two, range(3, 6))
    assert all(torch.equal(straight[n], resumed[n]) for n in straight)
    assert all(torch.equal(one.state()[n], value) for n, value in two.state().items())


def test_a_model_learns_with_moments_of_few_bits_as_with_float32(monkeypatch):
    monkeypatch.setattr("miles.train.optim.quantized_state.MIN_QUANTIZED_NUMEL", 64)  # the whole model is small
    samples = [replace(s, advantages=s.mask.astype(np.float32)) for s in ragged(8)]
    lost, moved = {}, {}
    for kind in ("float32", "bfloat16", "int8"):
        train = {"lr": 1e-2, "adam_eps": 1e-8, "optimizer_state_dtype": kind}
        trainer = worker(model(), algo={"loss_type": "sft_loss"}, updates=25, train=train)
        before = weights(trainer)
        lost[kind] = [step(trainer, samples, n).metrics["loss"] for n in range(25)]
        after = weights(trainer)
        moved[kind] = torch.cat([(after[n] - before[n]).flatten() for n in before])
    assert lost["float32"][-1] < 0.5 * lost["float32"][0]
    for kind, least in (("bfloat16", 0.999), ("int8", 0.98)):
        assert lost[kind][-1] == pytest.approx(lost["float32"][-1], rel=0.05)
        assert torch.cosine_similarity(moved["float32"], moved[kind], dim=0) > least


def test_a_run_may_go_on_with_fewer_bits_than_it_began_with(tmp_path):
    samples = ragged(8)
    one = worker(model(), train={"lr": 1e-3})
    step(one, samples)
    asyncio.run(one.save(tmp_path))
    other = worker(model(seed=1), train={"lr": 1e-3, "optimizer_state_dtype": "bfloat16"})
    asyncio.run(other.load(tmp_path))
    assert step(other, samples).metrics["grad_norm"] == pytest.approx(step(one, samples).metrics["grad_norm"])
