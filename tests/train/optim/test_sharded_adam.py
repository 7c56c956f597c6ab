"""Adam whose moments ranks share, against Adam over all values in one process."""

import pytest
import torch
from tests.pool import ranks
from torch import distributed as dist

from miles.backends.fsdp.device_mesh import CommGroup
from miles.kernels.numerics import FAST
from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import GradientError, Optimizer
from miles.train.optim.sharded_adam import ShardedMoments

SHAPES = {"matrix": (5, 7), "norm": (3,), "experts": (2, 3, 3), "bias": (1,)}
TOTAL = 57
State = dict[str, torch.Tensor]


def build_params() -> State:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random).requires_grad_() for name, shape in SHAPES.items()}


def build(params: State, group: CommGroup | None = None) -> Optimizer:
    config = TrainConfig(lr=1e-2, weight_decay=0.5, clip_grad=0.5)
    shards = None if group is None else ShardedMoments(group, torch.device("cpu"))
    return Optimizer(params, config, build_lr_schedule(config, updates=10), shards=shards)


def give(params: State, seed: int) -> None:
    """Gradients, of all parameters but one that has none in an odd step."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in params.items():
        grad = torch.randn(parameter.shape, generator=random)
        parameter.grad = None if name == "experts" and seed % 2 else grad


def run(optimizer: Optimizer, params: State, seeds: range) -> list[float]:
    norms: list[float] = []
    for seed in seeds:
        give(params, seed)
        norms.append(optimizer.step()[0])
    return norms


def step_ranks(rank: int, world: int, state: State | None, params: State | None) -> dict[str, object]:
    """Two steps of a rank, from the start or from what others have left."""
    own = build_params()
    optimizer = build(own, CommGroup(dist.group.WORLD, torch.device("cpu"), numerics=FAST))
    seeds = range(2)
    if state is not None and params is not None:
        for name, parameter in own.items():
            parameter.data = params[name].detach().clone()
        optimizer.load(state, updates=2)
        seeds = range(2, 4)
    for parameter in own.values():  # as a model does that was moved to the host and back
        parameter.data = parameter.data.clone()
    norms = run(optimizer, own, seeds)
    return {"norms": norms, "params": own, "state": dict(optimizer.state()), "bytes": optimizer.bytes}


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 3), (3, 2)])
def test_ranks_share_the_moments_of_one_optimizer_and_any_number_goes_on_from_its_state(first: int, then: int):
    params = build_params()
    optimizer = build(params)
    made = ranks(first, step_ranks, None, None)
    wanted_norms = run(optimizer, params, range(2))
    state = dict(optimizer.state())
    for found in made:
        assert found["norms"] == wanted_norms
        assert found["state"].keys() == state.keys()
        assert all(torch.allclose(found["state"][name], state[name], rtol=1e-6, atol=1e-9) for name in state)
        assert all(torch.allclose(found["params"][name], params[name], rtol=1e-6) for name in params)
    assert sum(found["bytes"] for found in made) == 2 * 4 * TOTAL
    assert max(found["bytes"] for found in made) == 2 * 4 * -(-TOTAL // first)
    left = made[0]["state"], made[0]["params"]
    run(optimizer, params, range(2, 4))
    for found in ranks(then, step_ranks, *left):
        assert all(torch.allclose(found["params"][name], params[name], rtol=1e-6) for name in params)
    # One process without shards goes on from it, too.
    heir_params = {name: p.detach().clone().requires_grad_() for name, p in left[1].items()}
    heir = build(heir_params)
    heir.load(left[0], updates=2)
    run(heir, heir_params, range(2, 4))
    assert all(torch.allclose(heir_params[name], params[name], rtol=1e-6) for name in params)


def spoil(rank: int, world: int) -> tuple[str, bool]:
    params = build_params()
    optimizer = build(params, CommGroup(dist.group.WORLD, torch.device("cpu"), numerics=FAST))
    before = {name: p.detach().clone() for name, p in params.items()}
    give(params, 0)
    grad = params["norm"].grad
    assert grad is not None
    grad[-1] = float("nan")
    with pytest.raises(GradientError) as raised:
        optimizer.step()
    return str(raised.value), all(torch.equal(params[name], before[name]) for name in params)


def test_a_gradient_that_is_no_number_is_named_and_changes_nothing():
    for said, same in ranks(2, spoil):
        assert same and "first at norm" in said
