"""Megatron's own buffers: its weights and their gradients lie one after the other, and go over the wire as they lie.

Every rank of those with the same layers comes to have the sum of an even run of the gradients, whatever parameters
begin or end in it; the distributed optimizer updates that run and gives it to the others.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn

from miles.backends.megatron import patches
from miles.backends.megatron.modules import Trunk
from miles.backends.megatron.names import Home
from miles.backends.megatron.places import Places
from miles.backends.megatron.shape import Shape


class Buffers:
    """The ``chunks`` of one rank in Megatron's data-parallel wrapper, which takes in gradients as they come.

    Gradients are float32 and sums: ``calculate_per_token_loss`` of the shape keeps Megatron from scaling them.
    """

    def __init__(self, chunks: Sequence[Trunk], shape: Shape, places: Places, homes: Mapping[str, Home]) -> None:
        assert shape.calculate_per_token_loss
        self.shape = shape
        self._home, self._away = shape.home, False
        self._dense: dict[str, Tensor] = {}
        for name, home in homes.items():
            tensors = places.modules(name)
            _mark(tensors, home)
            if tensors and not home.expert and tensors[0].requires_grad:
                self._dense[name] = tensors[0]
        told = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=False,
            average_in_collective=False,
            check_for_nan_in_grad=False,
        )
        self.wrapped: list[Any] = [DistributedDataParallel(shape, told, chunk) for chunk in chunks]
        patches.buckets_without_gaps(self.wrapped)
        # Stretches of the weights that others hold; they follow where the weights go.
        self.views: list[Tensor] = []
        self.forget()

    def grads(self) -> dict[str, Tensor]:
        """What has come to each parameter here, to be changed in place; experts are not among them."""
        return {name: grad_of(tensor) for name, tensor in self._dense.items()}

    def reduce(self) -> None:
        """Sum over the ranks with the same layers; each has its own run of the buffers after it."""
        for each in self.wrapped:
            each.finish_grad_sync()

    def forget(self) -> None:
        """Let all gradients be zero."""
        for each in self.wrapped:
            each.zero_grad_buffer()

    def move(self, device: torch.device) -> None:
        """The weights to a device; gradients take memory only at home, where they come back as zeros."""
        away = device.type != self._home.type
        if away is self._away:
            return
        self._away = away
        self.relocate(lambda flat: flat.to(device))
        for each in self.wrapped:
            each.offload_grad_buffers() if away else each.restore_grad_buffers()

    @torch.no_grad()
    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Put the memory of all weights elsewhere; every tensor that lay in it lies in the new one as it did."""
        tensors = [*self._holders()]
        before = [(t.untyped_storage().data_ptr(), t.shape, t.stride(), t.storage_offset()) for t in tensors]
        moved: dict[int, Tensor] = {}
        for tensor, (where, *_) in zip(tensors, before, strict=True):
            if where not in moved:
                flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                moved[where] = move(flat.set_(tensor.untyped_storage()))
        for tensor, (where, shape, stride, offset) in zip(tensors, before, strict=True):
            tensor.data = moved[where].as_strided(shape, stride, offset)
        for each in self.wrapped:
            for group in [*each.bucket_groups, *each.expert_parallel_bucket_groups]:
                group.cached_param_buffer_shard_list = [None] * len(group.buckets)

    def _holders(self) -> Iterator[Tensor]:
        yield from self.views
        for each in self.wrapped:
            for buffer in [*each.buffers, *each.expert_parallel_buffers]:
                assert buffer.param_data is not None
                yield buffer.param_data
                yield from (bucket.param_data for bucket in buffer.buckets)
                yield from buffer.param_index_map


def grad_of(tensor: Tensor) -> Tensor:
    """What has come to one of the modules' tensors: its place in Megatron's buffer."""
    assert isinstance(tensor, nn.Parameter)
    there: Any = tensor
    return there.main_grad


def _mark(tensors: Sequence[Tensor], home: Home) -> None:
    """What Megatron's norm and buffers go by, and its own initialisation, which is off, would have told them.

    Experts have buffers of their own in every layout, so that a checkpoint of one is read by another.
    """
    for tensor in tensors:
        there: Any = tensor
        there.tensor_model_parallel = home.expert or bool(home.share.parts)
        there.allreduce = not home.expert
