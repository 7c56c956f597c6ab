"""What autograd saves on Megatron's pipeline stages during a step, pass by pass. Imported by the ranks."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.train.config import TrainConfig

LENGTH = 24


@dataclass(frozen=True, kw_only=True)
class PipelineCase:
    """A step of ``count`` samples of ``LENGTH`` tokens, each a micro-batch of its own."""

    kind: str
    count: int
    flags: tuple[str, ...] = ()
    layout: dict[str, Any] = field(default_factory=lambda: {"pipeline": 2})
    train: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(train_backend="megatron", max_tokens_per_gpu=LENGTH, **self.train)


@dataclass(frozen=True)
class Watched:
    """What a rank has in a step: micro-batches in flight in each virtual stage, whenever a forward pass has ended; the
    bytes that a pass saves in each; bytes that autograd saves, and that operations make, at most.
    """

    in_flight: list[tuple[int, ...]]
    passes: tuple[int, ...]
    saved: int
    alive: int


class _Meter(TorchDispatchMode):
    """Adds up storages until they are freed: those that autograd saves, and all that operations make.

    Those at the addresses ``own`` are left out. A pass through one of ``chunks`` is in flight while most of what it
    saved is there.
    """

    def __init__(self, chunks: int, own: set[int]) -> None:
        super().__init__()
        self.now, self.peak = Counter[str](), Counter[str]()
        self.in_flight: list[tuple[int, ...]] = []
        self.sizes: list[Counter[int]] = [Counter() for _ in range(chunks)]
        self._own = own
        self._seen: dict[tuple[str, int], weakref.ref[Any]] = {}
        self._pass: tuple[int, int] | None = None
        self._left: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor, "alive")
        return out

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        self._add(tensor, "saved")
        return tensor

    def begin(self, chunk: int) -> None:
        """Begin a forward pass through a virtual stage."""
        self._pass = chunk, len(self.sizes[chunk])
        self.sizes[chunk][self._pass[1]] = 0

    def end(self) -> None:
        """End it."""
        self._pass = None
        self.in_flight.append(tuple(self._count(chunk) for chunk in range(len(self.sizes))))

    def _count(self, chunk: int) -> int:
        return sum(2 * self._left[chunk, number] > size for number, size in self.sizes[chunk].items())

    def _add(self, tensor: Tensor, kind: str) -> None:
        storage, of = tensor.untyped_storage(), self._pass
        key, size = (kind, storage._cdata), storage.nbytes()
        if key in self._seen or storage.data_ptr() in self._own:
            return
        if kind == "saved" and of is not None:
            self.sizes[of[0]][of[1]] += size
            self._left[of] += size

        def free(_: object) -> None:
            del self._seen[key]
            self.now[kind] -= size
            if kind == "saved" and of is not None:
                self._left[of] -= size

        self._seen[key] = weakref.ref(storage, free)
        self.now[kind] += size
        self.peak[kind] = max(self.now[kind], self.peak[kind])


def watch_all(rank: int, world: int, folder: Path, watched: list[PipelineCase]) -> list[Watched]:
    """What each case's step saves on this rank."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        return [_watch(case, folder / case.kind.replace(" ", "_"), world) for case in watched]


def _watch(case: PipelineCase, folder: Path, world: int) -> Watched:
    from tests.train.small_trainer import worker

    from miles.backends.megatron.config import build_recompute_flags
    from miles.backends.megatron.model import load_megatron_model
    from miles.backends.megatron.parallel_state import destroy_parallel_state
    from miles.launch.plan.layout_memory import get_recompute_layers, get_recompute_mode

    spec, config = spec_from_config(read_config(folder)), case.config
    recompute = build_recompute_flags(get_recompute_mode(config), get_recompute_layers(config))
    layout = ParallelDims(world=world, **case.layout)
    try:
        model: Any = load_megatron_model(
            folder, spec, layout, dtype=torch.float32, flags=(*case.flags, *recompute), balanced=False
        )
        train = {"max_tokens_per_gpu": LENGTH, **case.train}
        trainer = worker(model, algo={}, train=train, temperature=0.9, dp_group=model.dp_group)
        batch = Batch(step=0, samples=_list_samples(case.count), num_groups=1)
        run, found = model.forward_backward, []

        def watched(*args: Any, **how: Any) -> Any:
            if not torch.is_grad_enabled():
                return run(*args, **how)
            return _meter(model, lambda: run(*args, **how), found)

        model.forward_backward = watched
        asyncio.run(trainer.step(batch))
        (one,) = found
        return one
    finally:
        destroy_parallel_state()


def _meter(model: Any, run: Any, found: list[Watched]) -> Any:
    weights = [p for tensors in model._registry._modules.values() for p in tensors]
    weights += model._registry.parameters.values()
    meter = _Meter(len(model._chunks), {tensor.untyped_storage().data_ptr() for tensor in weights})
    hooks = []
    for number, chunk in enumerate(model._chunks):
        hooks.append(chunk.register_forward_pre_hook(lambda *_, number=number: meter.begin(number)))
        hooks.append(chunk.register_forward_hook(lambda *_: meter.end()))
    try:
        with meter, torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda tensor: tensor):
            return run()
    finally:
        for hook in hooks:
            hook.remove()
        grads = sum(p.grad.nbytes for p in weights if p.grad is not None)
        passes = tuple(max(sizes.values()) for sizes in meter.sizes)
        found.append(Watched(meter.in_flight, passes, meter.peak["saved"], meter.peak["alive"] - grads))


def _list_samples(count: int) -> tuple[Any, ...]:
    from tests.train.small_trainer import sample

    rng = np.random.default_rng(3)
    return tuple(sample(rng, prompt=4, reply=LENGTH - 4, trajectory=i, advantage=1.0 + i) for i in range(count))
