"""The optimizer state of a CUDA device, offloaded and taken back: same values, same host memory, no device memory."""

import pytest
import torch

from miles.models.optim_groups import MuonMatrices
from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import Optimizer

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SHAPES = {"matrix": (1024, 1500), "other": (512, 256), "norm": (1500,)}
HOST = torch.device("cpu")
KINDS = [("adam", "float32"), ("adam", "bfloat16"), ("adam", "int8"), ("muon", "float32")]


class Matrices:
    """The part of a model that Muon needs."""

    def gather(self, name, local):
        return local

    def shard(self, name, full):
        return full

    def muon_matrices(self):
        return {"matrix": MuonMatrices(shape=SHAPES["matrix"], rows=((0, 1024),))}


def build(optimizer, moments):
    torch.manual_seed(0)
    params = {name: torch.randn(shape, device="cuda").bfloat16().requires_grad_() for name, shape in SHAPES.items()}
    config = TrainConfig(lr=1e-2, weight_decay=0.1, optimizer=optimizer, optimizer_state_dtype=moments)
    return params, Optimizer(params, config, build_lr_schedule(config, updates=10), model=Matrices())


def update(params, optimizer, seed):
    torch.manual_seed(seed)
    for p in params.values():
        (p * torch.randn_like(p)).sum().backward()
    return optimizer.step()


def clone(state):
    return {name: value.detach().cpu().clone() for name, value in state.items()}


@pytest.mark.parametrize(("optimizer", "moments"), KINDS)
def test_updates_are_the_same_to_the_bit_with_and_without_offload(optimizer, moments):
    (here, one), (moved, other) = build(optimizer, moments), build(optimizer, moments)
    device = torch.device("cuda", torch.cuda.current_device())
    for seed in range(4):
        other.move(HOST)
        if moments != "int8":  # which a CPU decodes with other roundings
            saved = clone(other.state())
            assert all(torch.equal(value.cpu(), saved[name]) for name, value in one.state().items())
            if seed == 2:  # restored while it is offloaded
                other.load(saved, updates=2)
        other.move(device)
        assert update(here, one, seed) == update(moved, other, seed)
    assert all(torch.equal(here[name], moved[name]) for name in SHAPES)


@pytest.mark.parametrize(("optimizer", "moments"), KINDS)
def test_each_offload_uses_the_same_page_locked_memory_and_frees_the_devices(optimizer, moments):
    params, built = build(optimizer, moments)
    update(params, built, 0)
    device, held, pointers = torch.device("cuda", torch.cuda.current_device()), [], []
    for seed in range(1, 4):
        before = torch.cuda.memory_allocated()
        built.move(HOST)
        assert before - torch.cuda.memory_allocated() >= built.bytes
        places = built._host_copies._places.values()
        assert all(torch.from_numpy(place.bytes).is_pinned() for place in places)
        assert built._host_copies.bytes == built.bytes
        pointers.append([place.bytes.ctypes.data for place in places])
        built.move(device)
        held.append(torch.cuda.memory_allocated())
        update(params, built, seed)
    assert pointers[0] == pointers[1] == pointers[2] and held[0] == held[1] == held[2]


def test_a_new_optimizer_has_the_memory_of_one_that_is_gone():
    _, built = build("adam", "float32")
    built.move(HOST)
    master = built.trained_params()[0].master
    assert master.is_pinned()
    del built
    assert not master.is_pinned()
