"""Decode steps of recurrent layers by the Triton kernels: what the layers in torch compute, no other state moved."""

import numpy as np
import pytest
import torch
from tests.kernels import interpreter  # noqa: F401
from tests.kernels.device import DEVICE, apart, needs_triton
from tests.models.test_recurrent import mixer_of

from miles.kernels.linear_attention import decode_step
from miles.kernels.runtime.kv_cache import PooledRecurrentState, RecurrentStatePool

pytestmark = needs_triton

KINDS = [
    "hybrid qwen3 next",
    "hybrid qwen3 next with biases, gates not normalised",
    "hybrid qwen3.5",
    "hybrid kimi linear query latent, in groups",
    "hybrid glm 5.3 flash",
    "hybrid nemotron h",
    "hybrid nemotron 3",
    "lfm2 untied with biases, longer convolution",
]
ROWS, SLOTS = [4, 0, 3], 6


class Pool:
    """A step whose sequences have one new token each, in some rows of a pool of random states."""

    latent = False

    def __init__(self, module, state):
        shapes = {module.layer: [(tuple(each.shape[1:]), each.dtype) for each in state]}
        self.pool = RecurrentStatePool(shapes, slots=SLOTS, device=DEVICE)
        generator = torch.Generator().manual_seed(0)
        for tensor in self.tensors(module):
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))

    def tensors(self, module):
        return self.pool.layers[module.layer]

    def at(self, starts, graph):
        rows, starts = np.array(ROWS), np.array(starts)
        if graph:
            self.step = self.pool.select_rows(
                torch.from_numpy(rows).to(DEVICE), torch.from_numpy(starts == 0).to(DEVICE)
            )
        else:
            self.step = self.pool.select(rows, starts, np.ones_like(rows))
        return self

    def recurrent_state(self, layer):
        return self.step.recurrent_state(layer)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_three_tokens_are_those_of_the_layer_in_torch(kind, graph, monkeypatch):
    module, state = mixer_of(kind, torch.float32)
    module = module.to(DEVICE)
    pools = [Pool(module, state) for _ in range(2)]
    before = [tensor.clone() for tensor in pools[0].tensors(module)]
    generator = torch.Generator().manual_seed(1)
    stored, update = [], PooledRecurrentState.update
    monkeypatch.setattr(PooledRecurrentState, "update", lambda self, state: (stored.append(1), update(self, state))[1])
    for number in range(3):
        x_BD = torch.randn(len(ROWS), 32, generator=generator).to(DEVICE)
        outs = []
        for pool, with_kernels in zip(pools, (False, True), strict=True):
            monkeypatch.setattr(decode_step, "use_triton_inference", lambda x, wanted=with_kernels: wanted)
            with torch.inference_mode():
                # The second sequence begins with the first token.
                outs.append(module(x_BD, None, pool.at([5 + number, number, 9 + number], graph)))
        assert apart(*outs) < 1e-5
    assert len(stored) == 3  # the kernels update the pool themselves
    for found, wanted, old in zip(*(pool.tensors(module) for pool in reversed(pools)), before, strict=True):
        assert apart(found, wanted) < 1e-5
        untouched = [row for row in range(SLOTS) if row not in ROWS]
        assert torch.equal(found[untouched], old[untouched])
        assert not torch.equal(found[ROWS], old[ROWS])
