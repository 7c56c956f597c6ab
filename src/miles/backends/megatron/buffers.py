"""Megatron's parameter and gradient buffers: contiguous, so that collectives need no copies.

Every rank with the same layers gets the sum of an even range of the gradients, whatever parameters begin or end in it;
the distributed optimizer updates that range and all-gathers it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn

from miles.backends.megatron import patches
from miles.backends.megatron.layer_spec import GPTBackbone
from miles.backends.megatron.param_mapping import ParamMapping
from miles.backends.megatron.param_registry import ParamRegistry
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.cluster.host_copies import HostCopies


class ParamGradBuffers:
    """The ``chunks`` of one rank in Megatron's DistributedDataParallel, which accumulates gradients.

    Gradients are float32 sums: ``calculate_per_token_loss`` of the config keeps Megatron from scaling them.
    """

    def __init__(
        self,
        chunks: Sequence[GPTBackbone],
        tf_config: DecoderTransformerConfig,
        registry: ParamRegistry,
        mappings: Mapping[str, ParamMapping],
    ) -> None:
        assert tf_config.calculate_per_token_loss
        self.tf_config = tf_config
        self._device, self._offloaded = tf_config.param_device, False
        self._host_copies = HostCopies()
        self._dense: dict[str, Tensor] = {}
        for name, mapping in mappings.items():
            tensors = registry.modules(name)
            _set_parallel_attributes(tensors, mapping)
            if tensors and not mapping.expert and tensors[0].requires_grad:
                self._dense[name] = tensors[0]
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=False,
            average_in_collective=False,
            check_for_nan_in_grad=False,
        )
        self.ddp_chunks: list[Any] = [DistributedDataParallel(tf_config, ddp_config, chunk) for chunk in chunks]
        patches.patch_bucket_padding(self.ddp_chunks)
        # Views of the weights held elsewhere; ``relocate`` moves them with the weights.
        self.views: list[Tensor] = []
        self.zero_grads()

    def grads(self) -> dict[str, Tensor]:
        """Return the accumulated gradients, to be modified in place; without experts."""
        return {name: get_main_grad(tensor) for name, tensor in self._dense.items()}

    def reduce(self) -> None:
        """Reduce-scatter over the ranks with the same layers; each then has its own range of the buffers."""
        for each in self.ddp_chunks:
            each.finish_grad_sync()

    def zero_grads(self) -> None:
        """Set all gradients to zero."""
        for each in self.ddp_chunks:
            each.zero_grad_buffer()

    def move(self, device: torch.device) -> None:
        """Move the weights to a device; gradient buffers are freed elsewhere and come back as zeros."""
        offloaded = device.type != self._device.type
        if offloaded is self._offloaded:
            return
        self._offloaded = offloaded
        numbers = count()

        def copy(flat: Tensor) -> Tensor:
            name = f"weights {next(numbers)}"
            return self._host_copies.copy({name: flat}, device)[name]

        self.relocate(copy)
        for each in self.ddp_chunks:
            each.offload_grad_buffers() if offloaded else each.restore_grad_buffers()
        if not offloaded:
            self.restore_grad_hooks()

    def restore_grad_hooks(self) -> None:
        """Let Megatron accumulate gradients again after weights have been on another device.

        Its hooks are on autograd's AccumulateGrad nodes, which torch discards when ``data`` is set to a tensor of
        another device: without them the buffers stay zero, and nothing is learned.
        """
        for each in self.ddp_chunks:
            each.grad_accs = []
            for param in each.module.parameters():
                if param.requires_grad:
                    node = param.expand_as(param).grad_fn.next_functions[0][0]
                    node.register_hook(each._make_backward_post_hook(param))
                    each.grad_accs.append(node)

    @torch.no_grad()
    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move the storage of all weights; every tensor that is a view of it becomes a view of the new one."""
        tensors = [*self._views_of_weights()]
        before = [(t.untyped_storage().data_ptr(), t.shape, t.stride(), t.storage_offset()) for t in tensors]
        moved: dict[int, Tensor] = {}
        for tensor, (storage, *_) in zip(tensors, before, strict=True):
            if storage not in moved:
                flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                moved[storage] = move(flat.set_(tensor.untyped_storage()))
        for tensor, (storage, shape, stride, offset) in zip(tensors, before, strict=True):
            tensor.data = moved[storage].as_strided(shape, stride, offset)
        for each in self.ddp_chunks:
            for group in [*each.bucket_groups, *each.expert_parallel_bucket_groups]:
                group.cached_param_buffer_shard_list = [None] * len(group.buckets)

    def _views_of_weights(self) -> Iterator[Tensor]:
        yield from self.views
        for each in self.ddp_chunks:
            for buffer in [*each.buffers, *each.expert_parallel_buffers]:
                assert buffer.param_data is not None
                yield buffer.param_data
                yield from (bucket.param_data for bucket in buffer.buckets)
                yield from buffer.param_index_map


def get_main_grad(tensor: Tensor) -> Tensor:
    """Return the gradient of a module's parameter: its view of Megatron's buffer."""
    assert isinstance(tensor, nn.Parameter)
    param: Any = tensor
    return param.main_grad


def _set_parallel_attributes(tensors: Sequence[Tensor], mapping: ParamMapping) -> None:
    """Set the attributes that Megatron's norm and buffers read; its own initialization, which is off, would set them.

    Experts have buffers of their own in every layout, so that one layout's checkpoint can be read by another.
    """
    for tensor in tensors:
        param: Any = tensor
        param.tensor_model_parallel = mapping.expert or bool(mapping.tp_shard.segments)
        param.allreduce = not mapping.expert
