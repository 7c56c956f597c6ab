"""Optimizers on an accelerator: state on the host and in few bits, and Muon in half precision."""

import pytest
import torch
from tests.train.matrix_ranks import Model, config_of, one

from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import Optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")

SHAPES = {"matrix": (300, 256), "norm": (256,), "experts": (4, 64, 96)}


def run(dtype, updates=4, **knobs):
    """The parameters after some updates, the state, and what the device holds of it."""
    torch.manual_seed(0)
    params = {n: torch.randn(s).to("cuda", dtype).requires_grad_() for n, s in SHAPES.items()}
    config = TrainConfig(lr=1e-2, **knobs)
    before = torch.cuda.memory_allocated()
    optimizer = Optimizer(params, config, build_lr_schedule(config, updates=9))
    for seed in range(updates):
        torch.manual_seed(seed)
        for p in params.values():
            (p * torch.randn(p.shape).to(p)).sum().backward()
        optimizer.step()
    held = torch.cuda.memory_allocated() - before
    state = {name: value.cpu() for name, value in optimizer.state().items()}
    return {n: p.detach().cpu() for n, p in params.items()}, state, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
def test_state_that_streams_through_the_device_makes_the_same_updates(dtype, kept, monkeypatch):
    monkeypatch.setattr("miles.train.optim.adam._SLICE", 1 << 12)  # many slices in flight
    here, state, held = run(dtype, optimizer_state_dtype=kept)
    there, other, left = run(dtype, optimizer_state_dtype=kept, optimizer_cpu_offload=True)
    assert all(torch.equal(here[n], there[n]) for n in SHAPES)
    # What is kept is the same; eight bits are decoded where they lie, and a host's exponential rounds as it does.
    near = 1e-6 if kept == "int8" else 0.0
    assert all(torch.allclose(state[n].cpu(), other[n].cpu(), rtol=near, atol=0.0) for n in state)
    assert left < held / 10


def test_the_updates_are_those_of_torch():
    mine, _, _ = run(torch.float32, clip_grad=0.0, weight_decay=0.0)
    torch.manual_seed(0)
    theirs = {n: torch.randn(s).to("cuda").requires_grad_() for n, s in SHAPES.items()}
    reference = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.0, fused=True)
    for seed in range(4):
        torch.manual_seed(seed)
        for p in theirs.values():
            p.grad = torch.randn(p.shape).to(p)
        reference.step()
    assert all(torch.equal(mine[n], theirs[n].cpu()) for n in SHAPES)


@pytest.mark.parametrize("hosted", [False, True], ids=["here", "hosted"])
def test_matrices_are_updated_as_torch_muon_updates_them_there(hosted):
    shapes = {"tall": (192, 64), "wide": (64, 192)}
    torch.manual_seed(0)
    mine = {n: torch.randn(s).cuda().requires_grad_() for n, s in shapes.items()}
    theirs = {n: p.detach().clone().requires_grad_() for n, p in mine.items()}
    config = config_of(optimizer_cpu_offload=hosted)
    model = Model({n: one(s) for n, s in shapes.items()})
    optimizer = Optimizer(mine, config, build_lr_schedule(config, updates=9), model=model)
    reference = torch.optim.Muon(theirs.values(), lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for seed in range(3):
        torch.manual_seed(seed)
        for name, p in mine.items():
            p.grad = torch.randn(p.shape).cuda()
            theirs[name].grad = p.grad.clone()
        optimizer.step()
        reference.step()
    # Both round to bfloat16 on the way; a step is 0.02 long.
    assert all(torch.allclose(mine[n], theirs[n], rtol=0, atol=1e-3) for n in shapes)
