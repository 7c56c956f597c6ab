import gc
import math
import weakref

import pytest
import torch

from miles.core.errors import CheckpointError
from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import GradientError, Optimizer, full_grad_norm

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
    return Optimizer(params, config, build_lr_schedule(config, updates=updates))


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


def test_parameters_and_masters_are_freed_with_their_optimizer_without_a_collection():
    params = parameters(torch.bfloat16)
    optimizer = build(params)
    give(params, 1)
    optimizer.step()
    kept = [weakref.ref(p) for p in params.values()]
    kept += [weakref.ref(p.master) for p in optimizer.trained_params()]
    gc.disable()
    try:
        del params, optimizer
        assert not [reference for reference in kept if reference() is not None]
    finally:
        gc.enable()


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
        optimizer.load(dict(optimizer.state()) | {"exp_avg.other": torch.zeros(1)}, updates=1)
    with pytest.raises(CheckpointError, match=r"exp_avg\.matrix has shape"):
        optimizer.load(dict(optimizer.state()) | {"exp_avg.matrix": torch.zeros(1)}, updates=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_lives_on_the_host_makes_the_same_updates(dtype, monkeypatch):
    monkeypatch.setattr("miles.train.optim.adam._SLICE", 8)  # so that a weight is several slices
    here, hosted = parameters(dtype), parameters(dtype)
    one, other = build(here), build(hosted, optimizer_cpu_offload=True)
    for seed in range(4):
        give(here, seed)
        give(hosted, seed)
        assert one.step() == other.step()
        other.move(torch.device("cpu"))
    assert all(torch.equal(here[n], hosted[n]) for n in SHAPES)
    assert all(torch.equal(value, other.state()[n]) for n, value in one.state().items())
    assert list(one.state()) == list(other.state())


def test_a_checkpoint_goes_on_whether_or_not_the_state_lives_on_the_host():
    here, hosted = parameters(torch.bfloat16), parameters(torch.bfloat16)
    one, other = build(here), build(hosted, optimizer_cpu_offload=True)
    give(here, 0)
    one.step()
    for name, p in hosted.items():
        p.data.copy_(here[name])
    other.load(one.state(), updates=1)
    for params, optimizer in ((here, one), (hosted, other)):
        give(params, 1)
        optimizer.step()
    assert all(torch.equal(here[n], hosted[n]) for n in SHAPES)


def test_a_norm_of_the_models_own_decides_what_is_clipped_and_what_is_refused():
    """Two ranks with a part each, in one process: the other's part of the gradient is three times as long."""
    mine, whole = parameters(), parameters()
    give(mine, 0, scale=2.0)
    give(whole, 0, scale=2.0)
    own = math.sqrt(sum(float(p.grad.square().sum()) for p in mine.values() if p.grad is not None))
    config = TrainConfig(lr=1e-2, clip_grad=1.0)
    optimizer = Optimizer(
        mine, config, build_lr_schedule(config, updates=9), norm=lambda g: math.sqrt(10) * full_grad_norm(g)
    )
    norm, _ = optimizer.step()
    assert norm == pytest.approx(math.sqrt(10) * own, rel=1e-5)
    for p in whole.values():
        p.grad = p.grad / norm  # type: ignore[operator]
    build(whole, clip_grad=0.0, weight_decay=0.01).step()
    assert all(torch.allclose(mine[n], whole[n], atol=1e-6) for n in SHAPES)


def test_all_ranks_name_the_same_first_bad_parameter():
    """What another rank's norm adds: its part of the second parameter is bad, and of this rank's the third."""
    params, asked = parameters(), []
    config = TrainConfig(lr=1e-2)

    def norm(grads):
        asked.append(len(grads))
        theirs = {"norm": torch.tensor([float("nan")])} if len(asked) == 1 else reported[len(asked) - 2]
        return full_grad_norm({**{f"mine {n}": g for n, g in grads.items()}, **theirs})

    # The other rank's marks: its bad one is number 1 of the list, asked for in halves of 2**20.
    reported, low, high = [{"theirs": torch.ones(1)}], 0, 1 << 20
    for _ in range(20):
        middle = (low + high) // 2
        inside = low <= 1 < middle
        reported.append({"theirs": torch.full((1,), float(inside))})
        low, high = (low, middle) if inside else (middle, high)
    optimizer = Optimizer(params, config, build_lr_schedule(config, updates=9), norm=norm)
    give(params, 0)
    params["experts"].grad[0] = float("inf")  # type: ignore[index]
    with pytest.raises(GradientError, match="first at norm"):
        optimizer.step()
    assert asked == [3] * 22


def test_a_part_of_a_parameter_may_be_empty():
    params = parameters() | {"none": torch.zeros(0, 4, requires_grad=True)}
    for knobs in ({}, {"optimizer_state_dtype": "bfloat16"}):
        optimizer = build(params, **knobs)
        give(params, 0)
        params["none"].grad = torch.zeros(0, 4)
        optimizer.step()


def test_moving_the_state_changes_no_number():
    params = parameters(torch.bfloat16)
    optimizer = build(params)
    give(params, 0)
    optimizer.step()
    before = {n: v.clone() for n, v in optimizer.state().items()}
    optimizer.move(torch.device("cpu"))
    assert all(torch.equal(before[n], v) for n, v in optimizer.state().items())


@pytest.fixture
def offloads_here(monkeypatch):
    """A CPU counts as another device than the host: states are moved to host copies."""
    monkeypatch.setattr("miles.cluster.host_copies._is_on", lambda tensor, device: False)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_saving_and_loading_are_the_same_with_host_copies(dtype, moments, offloads_here):
    here, moved = parameters(dtype), parameters(dtype)
    one, other = (build(params, optimizer_state_dtype=moments) for params in (here, moved))
    host, device = torch.device("cpu"), torch.device("cpu", 0)
    for seed in range(4):
        other.move(host)
        kept = {name: value.clone() for name, value in other.state().items()}
        assert all(torch.equal(value, kept[name]) for name, value in one.state().items())
        if seed == 2:  # restored while it is offloaded
            other.load(kept, updates=2)
        other.move(device)
        give(here, seed)
        give(moved, seed)
        assert one.step() == other.step()
    assert all(torch.equal(here[n], moved[n]) for n in SHAPES)
    assert list(one.state()) == list(other.state())


def test_an_offloaded_optimizer_leaves_nothing_behind(offloads_here):
    params = parameters(torch.bfloat16)
    optimizer = build(params)
    give(params, 0)
    optimizer.step()
    gc.disable()
    try:
        for _ in range(2):
            optimizer.move(torch.device("cpu"))
        blocks = [weakref.ref(place.block) for place in optimizer._host_copies._places.values()]
        assert optimizer._host_copies.bytes == optimizer.bytes
        del optimizer
        assert {block() for block in blocks} == {None}
    finally:
        gc.enable()


def test_the_moments_of_a_first_step_are_one_piece_of_memory_if_there_is_one(monkeypatch):
    def step():
        params = parameters(torch.bfloat16)
        optimizer = build(params)
        give(params, 0)
        optimizer.step()
        raws = [raw for moments in optimizer._rules[0]._moments.values() for raw in moments.list_raws().values()]
        return {raw.untyped_storage().data_ptr() for raw in raws}, raws, optimizer.state()

    storages, raws, state = step()
    assert len(storages) == 1 and len({raw.data_ptr() for raw in raws}) == 2 * len(SHAPES)
    assert all(raw.data_ptr() % 64 == 0 for raw in raws)
    zeros = torch.zeros

    def refuse(size, **options):
        if size == 2 * 512 * len(SHAPES):
            raise torch.OutOfMemoryError("no piece of this size")
        return zeros(size, **options)

    monkeypatch.setattr(torch, "zeros", refuse)
    scattered, _, same = step()
    assert len(scattered) == len(SHAPES)
    assert all(torch.equal(value, same[name]) for name, value in state.items())
