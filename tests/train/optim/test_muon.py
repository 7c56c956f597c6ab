"""Muon against torch's own, whole and shared by ranks."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.pool import ranks
from tests.train.matrix_ranks import (
    SHARED,
    Model,
    config_of,
    decoder_alone,
    decoder_on_a_rank,
    on_a_rank,
    one,
    trained,
)
from tests.train.small_trainer import DENSE, MOE, model, ragged, step, weights, worker

from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.models.checkpoint import param_map
from miles.models.families import spec_from_config
from miles.models.optim_groups import MuonMatrices, find_muon_matrices
from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.master_weights import TrainedParam
from miles.train.optim.muon import Muon, orthogonalize
from miles.train.optim.optimizer import Optimizer

MODES = {"original": ("shape_scaling", 1.0), "match_rms_adamw": ("spectral", 0.2)}


def give(params, seed):
    torch.manual_seed(seed)
    for p in params.values():
        p.grad = torch.randn(p.shape)


# -- the update -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 5, 8), (1, 6, 6)])
def test_an_orthogonal_part_has_the_singular_vectors_and_values_near_one(shape):
    torch.manual_seed(0)
    x_EMN = torch.randn(shape)
    turned = orthogonalize(x_EMN, steps=5, precision=torch.float32)
    assert ((torch.linalg.svdvals(turned) > 0.3) & (torch.linalg.svdvals(turned) < 1.3)).all()
    u, _, v = torch.linalg.svd(x_EMN, full_matrices=False)
    between = u.mT @ turned @ v.mT  # diagonal where the singular vectors are the same
    assert (between - torch.diag_embed(between.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-4
    assert torch.equal(orthogonalize(torch.zeros(shape), steps=5, precision=torch.float32), torch.zeros(shape))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_are_updated_as_torch_muon_updates_them(mode, nesterov):
    shapes = {"tall": (24, 10), "wide": (10, 24), "square": (12, 12)}
    torch.manual_seed(0)
    mine = {n: torch.randn(s, requires_grad=True) for n, s in shapes.items()}
    theirs = {n: p.detach().clone().requires_grad_() for n, p in mine.items()}
    scale, factor = MODES[mode]
    config = config_of(
        muon_scale_mode=scale, muon_extra_scale_factor=factor, muon_use_nesterov=nesterov, muon_momentum=0.9
    )
    table = Model({n: one(s) for n, s in shapes.items()})
    weights = [TrainedParam(n, p, offloaded=False) for n, p in mine.items()]
    rule = Muon(weights, config, table, precision=torch.bfloat16)
    reference = torch.optim.Muon(
        list(theirs.values()), lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=mode
    )
    for seed in range(4):
        give(mine, seed)
        give(theirs, seed)
        rule.step(1e-2, seed + 1)
        reference.step()
        # Both round to bfloat16 on the way, in products of another order.
        assert all(torch.allclose(mine[n], theirs[n], rtol=0, atol=1e-4) for n in shapes)


def expected(params, table, grads, config):
    """One update by torch's Muon of every matrix apart, in float32 products."""
    out = {}
    for name, p in params.items():
        out[name] = p.detach().clone()
        stack = out[name] if p.ndim == 3 else out[name][None]
        moved = grads[name] if p.ndim == 3 else grads[name][None]
        for expert in range(len(stack)):
            for rows in table[name].rows:
                part, grad = stack[expert][slice(*rows)], moved[expert][slice(*rows)]
                ahead = grad * (1 - config.muon_momentum) * config.muon_momentum + grad * (1 - config.muon_momentum)
                turned = orthogonalize(ahead[None], steps=5, precision=torch.float32)[0]
                part.mul_(1 - config.lr * config.weight_decay)
                part.sub_(turned * config.lr * 0.2 * max(part.shape) ** 0.5)
    return out


@pytest.mark.parametrize("kind", [DENSE, MOE], ids=["dense", "moe"])
def test_what_lies_fused_or_stacked_in_a_decoder_is_updated_matrix_by_matrix(kind):
    spec = spec_from_config(kind)
    table, held = find_muon_matrices(spec), dict(model(kind).parameters())
    mine = {n: held[n] for n in table}
    assert all(tuple(p.shape) == table[n].shape for n, p in mine.items())
    config = config_of()
    optimizer = Optimizer(mine, config, build_lr_schedule(config, updates=9), model=Model(table))
    give(mine, 0)
    want = expected(mine, table, {n: p.grad for n, p in mine.items()}, config)
    optimizer.step()
    assert all(torch.allclose(mine[n], want[n], atol=1e-5) for n in mine)


def test_the_matrices_of_a_decoder_are_those_of_its_checkpoint():
    """Qwen3's checkpoints hold every projection apart, so their tensors are the matrices."""
    for kind in (DENSE, MOE):
        spec = spec_from_config(kind)
        for name, found in find_muon_matrices(spec).items():
            on_disk = [(p.start, p.stop) for p in param_map.build_param_map(spec)[name] if p.expert in (None, 0)]
            assert [(start, stop) for start, stop, _ in found.rows] == on_disk
        left = {
            n.rpartition("layers.")[2] for n in param_map.build_param_map(spec) if n not in find_muon_matrices(spec)
        }
        assert not [n for n in left if "norm" not in n and "router" not in n and n not in ("embedding.weight",)]


def test_alternating_rows_are_two_matrices():
    torch.manual_seed(0)
    p = torch.randn(2, 8, 5, requires_grad=True)
    table = {"experts": MuonMatrices((2, 8, 5), ((0, 8, 2), (1, 8, 2)))}
    config = config_of()
    optimizer = Optimizer({"experts": p}, config, build_lr_schedule(config, updates=9), model=Model(table))
    give({"experts": p}, 0)
    want = expected({"experts": p}, table, {"experts": p.grad}, config)["experts"]
    optimizer.step()
    assert torch.allclose(p, want, atol=1e-5)


def test_everything_else_is_adams():
    held = dict(model(MOE).parameters())
    table = find_muon_matrices(spec_from_config(MOE))
    config = config_of()
    optimizer = Optimizer(held, config, build_lr_schedule(config, updates=9), model=Model(table))
    rest = {n: p.detach().clone().requires_grad_() for n, p in held.items() if n not in table}
    alone = Optimizer(
        rest,
        TrainConfig(**{f: getattr(config, f) for f in ("lr", "weight_decay", "clip_grad")}),
        build_lr_schedule(config, updates=9),
    )
    give(held, 0)
    for name, p in rest.items():
        p.grad = held[name].grad.clone()
    optimizer.step()
    alone.step()
    assert all(torch.equal(held[n], p) for n, p in rest.items())
    keys = {name.partition(".")[0] for name in optimizer.state()}
    assert keys == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


def test_a_model_whose_inside_is_unknown_is_refused():
    with pytest.raises(UsageError, match=r"--optimizer muon .*--model-impl native"):
        Optimizer({"w": torch.zeros(2, 2, requires_grad=True)}, config_of(), build_lr_schedule(config_of(), updates=9))


@pytest.mark.parametrize("hosted", [False, True], ids=["here", "hosted"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_restored_muon_goes_on_as_if_it_had_not_stopped(dtype, hosted):
    config = config_of(optimizer_state_dtype=dtype, optimizer_cpu_offload=hosted)
    table = Model({"w": one((80, 64))})

    def built(p):
        return Optimizer({"w": p}, config, build_lr_schedule(config, updates=9), model=table)

    torch.manual_seed(0)
    straight = torch.randn(80, 64).bfloat16().requires_grad_()
    first = built(straight)
    for seed in range(2):
        torch.manual_seed(seed)
        (straight * torch.randn(80, 64)).sum().backward()
        first.step()
    resumed = straight.detach().clone().requires_grad_()
    second = built(resumed)
    second.load({n: v.clone() for n, v in first.state().items()}, updates=2)
    for p, optimizer in ((straight, first), (resumed, second)):
        torch.manual_seed(7)
        (p * torch.randn(80, 64)).sum().backward()
        optimizer.step()
        optimizer.move(torch.device("cpu"))
    assert torch.equal(straight, resumed)
    assert first.bytes == 80 * 64 * ({"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}[dtype] + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_learns_by_muon_and_goes_on_from_its_checkpoint(dtype, tmp_path):
    samples = [replace(s, advantages=s.mask.astype(np.float32)) for s in ragged(8)]
    knobs = {"optimizer": "muon", "lr": 3e-2, "optimizer_cpu_offload": True}

    def built(seed):
        return worker(model(MOE, seed=seed, dtype=dtype), algo={"loss_type": "sft_loss"}, updates=12, train=knobs)

    one = built(0)
    losses = [step(one, samples, n).metrics["loss"] for n in range(10)]
    assert losses[-1] < 0.7 * losses[0]
    asyncio.run(one.save(tmp_path))
    other = built(1)
    asyncio.run(other.load(tmp_path))
    for trainer in (one, other):
        step(trainer, samples, 10)
    assert all(torch.equal(p, weights(other)[n]) for n, p in weights(one).items())


# -- ranks ----------------------------------------------------------------------------------


def test_ranks_that_share_matrices_update_them_as_one_would():
    alone = trained(Model(SHARED), lambda name, whole: whole)
    for found in ranks(3, on_a_rank):
        assert all(torch.allclose(found[n], p, atol=1e-6) for n, p in alone.items())


CHOICES = [{}, {"optimizer": "adam", "optimizer_cpu_offload": True}]
LAYOUTS = [ParallelDims(world=2, shard=2), ParallelDims(world=2, tensor=2), ParallelDims(world=2, shard=2, expert=2)]


def test_a_decoder_that_ranks_share_is_updated_as_one_process_updates_it(tmp_path):
    model(MOE).save(tmp_path)
    alone = [decoder_alone(tmp_path, **knobs) for knobs in CHOICES]
    for found in ranks(2, decoder_on_a_rank, str(tmp_path), LAYOUTS, CHOICES):
        for number, made in enumerate(found):
            want = alone[number % len(CHOICES)]
            assert made.keys() == want.keys()
            assert all(torch.allclose(made[n], p, atol=1e-5) for n, p in want.items())
