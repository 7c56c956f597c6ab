"""Runs Megatron-Core, which requests CUDA by name, on a CPU over gloo for the duration of a test."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch.utils import _device

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "as_tensor")


def _home(device: Any) -> Any:
    named = device if isinstance(device, str) else getattr(device, "type", "")
    return CPU if str(named).startswith("cuda") else device


def _on_cpu(make: Any) -> Any:
    def made(*args: Any, **how: Any) -> Any:
        if "device" in how:
            how["device"] = _home(how["device"])
        return make(*args, **how)

    return made


class _Nothing:
    """A stream or an event: whatever is asked of it is done already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Nothing()


_type = torch.Tensor.type


def _type_of(tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
    """Megatron's optimizer tells types by what they are called on a GPU."""
    found = _type(tensor, *args, **how)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


_gathers, _scatters = dist.all_gather, dist.reduce_scatter


def _all_gather(out: list[torch.Tensor], x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gloo gathers only equal shapes, NCCL any."""
    if all(each.shape == out[0].shape for each in out):
        return _gathers(out, x, group=group, async_op=async_op)
    for rank, each in enumerate(out):
        if rank == dist.get_rank(group):
            each.copy_(x)
        dist.broadcast(each, group=group, group_src=rank)


def _reduce_scatter(
    out: torch.Tensor, parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    if all(each.shape == parts[0].shape for each in parts):
        return _scatters(out, parts, op=op, group=group, async_op=async_op)
    for rank, each in enumerate(parts):
        summed = each.contiguous().clone()
        dist.all_reduce(summed, op=op, group=group)
        if rank == dist.get_rank(group):
            out.copy_(summed)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron's CUDA is this CPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    # torch looks constructors up by identity in a set made on first use, which must know the real ones.
    _device._device_constructors()
    wrong = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "set_device", lambda *_: None),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "Stream", _Nothing),
        (torch.cuda, "Event", _Nothing),
        (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "current_stream", lambda *_: _Nothing()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (torch.Tensor, "type", _type_of),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (token_dispatcher, "maybe_move_tensor_to_cpu", moved),
        (dist, "all_gather", _all_gather),
        (dist, "reduce_scatter", _reduce_scatter),
        *((torch, name, _on_cpu(getattr(torch, name))) for name in FACTORIES),
    ]
    with contextlib.ExitStack() as stack:
        for home, name, mine in wrong:
            stack.enter_context(patch.object(home, name, mine))
        yield
