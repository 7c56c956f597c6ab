"""Unmerged LoRA adapters of a model runner: host copies, device slots, and the rows of each step by adapter.

Slots of a projection are part of the grouped LoRA kernels' inputs; the projection's ``adapter`` adds their products to
its output. Steps without adapters run as if there were none.

Shapes: as in ``kernels.lora.grouped``; B sequences, n rows of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine.lora import LoraBatch, LoraShape
from miles.backends.native.engine.request import Ints
from miles.core.errors import UsageError
from miles.core.types import Array
from miles.kernels.lora.grouped import (
    LoraPlan,
    LoraSlots,
    add_grouped_lora,
    build_tiles,
    choose_tile_rows,
    count_tiles,
    split_columns,
)
from miles.kernels.numerics import Numerics
from miles.models.base import CausalLM
from miles.models.decoder import Decoder, DecoderLayer
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.layers.linear import Linear
from miles.models.lora.factors import LoraFactors
from miles.models.lora.layout import LORA_A, LORA_B, factor_name
from miles.models.lora.targets import LoraTarget, list_targets, targets_from_modules
from miles.models.parallel.tp_sharding import compute_tp_shards
from miles.models.spec import AdapterSpec, DecoderSpec

__all__ = ["LoraRunner", "count_slot_bytes", "list_served_modules"]

# Attention in the engine absorbs this projection of MLA into queries and outputs.
_ABSORBED = ".mla.kv_b.weight"
_NUM_HOST_BUFFERS = 3
# Tiles from which a shrink launch has enough programs without dividing the inputs.
_MANY_TILES = 128


def list_served_modules(spec: DecoderSpec, words: Sequence[str], numerics: Numerics) -> tuple[str, ...]:
    """Return the modules that adapters may target: all, or those that ``words`` (names, or their last parts) match.

    UsageError for a word that names no module, or one that is not served beside the weights.
    """
    if isinstance(spec, HfAdapterSpec):
        raise UsageError("adapters are not served with a model run by transformers; remove --enable-lora.")
    targets = [target for target in list_targets(spec) if not target.is_vision and not target.num_experts]
    served = [t for t in targets if numerics.batch_invariant or not t.param_name.endswith(_ABSORBED)]
    if not words or "all" in words or "all-linear" in words:
        return tuple(target.module for target in served)
    for word in words:
        if not any(_matches(target, word) for target in targets):
            names = ", ".join(dict.fromkeys(target.short_name for target in served))
            raise UsageError(f"--lora-target-modules {word} names no projection of this model; choose among {names}.")
        if not any(_matches(target, word) for target in served):
            raise UsageError(
                f"--lora-target-modules {word} is absorbed into attention by the engine, so its adapters are served "
                "with --parity exact only."
            )
    return tuple(target.module for target in served if any(_matches(target, word) for word in words))


def _matches(target: LoraTarget, word: str) -> bool:
    return word in (target.short_name, target.module)


def count_slot_bytes(spec: DecoderSpec, shape: LoraShape, itemsize: int) -> int:
    """Return the memory of all slots of one rank's decoder."""
    targets = targets_from_modules(spec, shape.modules)
    return shape.num_slots * shape.max_rank * itemsize * sum(target.inputs + target.outputs for target in targets)


@dataclass(slots=True)
class _Step:
    """The plan that the projections of the step being launched read."""

    plan: LoraPlan | None = None


class _Projection:
    """The slots of one projection; called with its output and input."""

    def __init__(self, module: Linear, slots: LoraSlots, targets: Sequence[LoraTarget], step: _Step) -> None:
        self.module = module
        self.slots = slots
        self.targets = tuple(target.module for target in targets)
        self._step = step

    def __call__(self, y_TN: Tensor, x_TI: Tensor) -> Tensor:
        assert self._step.plan is not None
        return add_grouped_lora(y_TN, x_TI, self.slots, self._step.plan, numerics=self.module.numerics)


@dataclass(frozen=True, slots=True)
class _HostFactors:
    """This rank's factors of one projection, and the rank and scale of each target."""

    a_PrI: Tensor
    b_Or: Tensor
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


class LoraRunner:
    """The adapters of one rank's decoder; ``full_spec`` is that of the model of all ``world`` ranks."""

    def __init__(
        self,
        decoder: CausalLM,
        shape: LoraShape,
        full_spec: DecoderSpec,
        *,
        rank: int = 0,
        world: int = 1,
        max_rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        assert isinstance(decoder, Decoder), "adapters are served beside the weights of our own decoder"
        if full_spec.adapters is not None:
            raise UsageError("an engine with an adapter of its own serves no others; remove --lora-adapter-path.")
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._numerics = decoder.numerics
        self._rank, self._world = rank, world
        self._step = _Step()
        self._attached = False
        adapters = AdapterSpec(rank=1, alpha=1.0, modules=shape.modules)
        self._full_targets = _group_targets(targets_from_modules(full_spec, shape.modules))
        self._shards = compute_tp_shards(replace(full_spec, quantization=None, adapters=adapters)) if world > 1 else {}
        targets = _group_targets(targets_from_modules(decoder.spec, shape.modules))
        self._projections = {name: self._build_projection(decoder, name, own) for name, own in targets.items()}
        self._host: dict[int, dict[str, _HostFactors]] = {}
        self._static = _StaticPlans(max_rows, shape.num_slots, device, self._numerics)
        self.attach(True)  # norms in front of quantized projections keep what adapters read
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            layer.fuse_quantization()
        self.attach(False)

    def _build_projection(self, decoder: Decoder, name: str, targets: Sequence[LoraTarget]) -> _Projection:
        module = decoder.get_submodule(name.removesuffix(".weight"))
        assert isinstance(module, Linear), f"{name} is not a projection"
        spans = tuple((target.piece.start, target.piece.stop) for target in targets)
        slots, rank = self._shape.num_slots, self._shape.max_rank
        factory = {"device": self._device, "dtype": self._dtype}
        outputs = sum(stop - start for start, stop in spans)
        return _Projection(
            module,
            LoraSlots(
                a_SPRI=torch.zeros(slots, len(spans), rank, targets[0].inputs, **factory),
                b_SOR=torch.zeros(slots, outputs, rank, **factory),
                ranks_SP=torch.zeros(slots, len(spans), dtype=torch.int32, device=self._device),
                scales_SP=torch.zeros(slots, len(spans), dtype=torch.float32, device=self._device),
                columns_C4=torch.from_numpy(split_columns(spans)).to(self._device),
                spans=spans,
            ),
            targets,
            self._step,
        )

    # -- host memory ------------------------------------------------------------------------

    def register(self, uid: int, factors: LoraFactors) -> None:
        """Keep this rank's shards of the factors in host memory, in the model's dtype."""
        self._host[uid] = {
            name: self._fuse_factors(name, targets, factors)
            for name, targets in self._full_targets.items()
            if any(target.module in factors.modules for target in targets)
        }

    def unregister(self, uid: int) -> None:
        """Drop the host copy of a version; a slot that has it keeps it."""
        del self._host[uid]

    def _fuse_factors(self, name: str, targets: Sequence[LoraTarget], factors: LoraFactors) -> _HostFactors:
        """Return the factors of a projection as its slots have them; targets without factors are zeros of rank 0."""
        own = [factors.modules.get(target.module) for target in targets]
        ranks = tuple(0 if each is None else each.rank for each in own)
        width = max(ranks)
        a_PrI = torch.zeros(len(own), width, targets[0].inputs, dtype=self._dtype)
        b_Or = torch.zeros(sum(target.outputs for target in targets), width, dtype=self._dtype)
        first = 0
        for i, (target, each) in enumerate(zip(targets, own, strict=True)):
            if each is not None:
                a_PrI[i, : each.rank].copy_(each.a_rI)
                b_Or[first : first + target.outputs, : each.rank].copy_(each.b_Or)
            first += target.outputs
        if self._world > 1:
            a_shard, b_shard = (self._shards[factor_name(name, factor)] for factor in (LORA_A, LORA_B))
            a_PrI = a_shard.shard(a_PrI.flatten(0, 1), self._rank, self._world).unflatten(0, (len(own), width))
            b_Or = b_shard.shard(b_Or, self._rank, self._world)
        if self._device.type != "cpu":
            a_PrI, b_Or = a_PrI.pin_memory(), b_Or.pin_memory()
        return _HostFactors(a_PrI, b_Or, ranks, tuple(0.0 if each is None else each.scale for each in own))

    # -- a step -----------------------------------------------------------------------------

    @torch.no_grad()
    def load_slots(self, batch: LoraBatch) -> None:
        """Copy the adapters that a step loads into their slots; nothing waits for the device."""
        for uid, slot in zip(*(values.tolist() for values in batch.loads), strict=True):
            found = self._host[uid]
            for name, projection in self._projections.items():
                self._load_slot(projection.slots, slot, found.get(name))

    def _load_slot(self, slots: LoraSlots, slot: int, found: _HostFactors | None) -> None:
        if found is None:
            slots.ranks_SP[slot].zero_()
            return
        width = found.b_Or.shape[1]
        slots.a_SPRI[slot, :, :width].copy_(found.a_PrI.to(self._device, non_blocking=True))
        slots.b_SOR[slot, :, :width].copy_(found.b_Or.to(self._device, non_blocking=True))
        slots.ranks_SP[slot].copy_(torch.tensor(found.ranks, dtype=torch.int32), non_blocking=True)
        slots.scales_SP[slot].copy_(torch.tensor(found.scales), non_blocking=True)

    def build_plan(self, batch: LoraBatch, counts_B: Ints) -> LoraPlan:
        """Return the plan of an eager step whose sequences compute so many tokens each."""
        slots_T = np.repeat(batch.slots_B, counts_B)
        tile_rows = choose_tile_rows(len(slots_T), self._device, self._numerics)
        rows_T, tiles_G3 = build_tiles(slots_T, tile_rows)
        packed = torch.from_numpy(np.concatenate((tiles_G3.ravel(), rows_T)))
        if self._device.type != "cpu":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        tiles, rows = packed.split((tiles_G3.size, len(rows_T)))
        splits = None if len(tiles_G3) < _MANY_TILES else 1
        return LoraPlan(rows_T=rows, tiles_G3=tiles.view(-1, 3), tile_rows=tile_rows, splits=splits)

    def send_static_plan(self, batch: LoraBatch, num_rows: int) -> None:
        """Copy the plan of a decode step to where its CUDA graph of ``num_rows`` rows reads it."""
        self._static.send(batch.slots_B, num_rows)

    def clear_static_plan(self) -> None:
        """Let no row of a CUDA graph have an adapter: the rows of the last step may be more than the graph has."""
        self._static.send(np.zeros(0, np.int64), 0)

    def use_static_plan(self, num_rows: int) -> None:
        """Let the projections read the plan of CUDA graphs with ``num_rows`` rows; 0 is a graph without adapters."""
        self.use_plan(self._static.view(num_rows) if num_rows else None)

    def use_plan(self, plan: LoraPlan | None) -> None:
        """Let the projections read this plan; None is a step without adapters."""
        self._step.plan = plan
        self.attach(plan is not None)

    def attach(self, attached: bool) -> None:
        """Add the adapters to the projections, or remove them: without any, layers fuse what is behind a projection."""
        if attached != self._attached:
            for projection in self._projections.values():
                projection.module.adapter = projection if attached else None
            self._attached = attached


class _StaticPlans:
    """The plans of CUDA graphs: one buffer on the device, several in pinned host memory; padding rows have no tile."""

    def __init__(self, max_rows: int, num_slots: int, device: torch.device, numerics: Numerics) -> None:
        self._num_slots = num_slots
        self._tile_rows = choose_tile_rows(1, device, numerics)
        self._max_tiles = count_tiles(max_rows, num_slots, self._tile_rows)
        size = 3 * self._max_tiles + max_rows
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        hosts = [torch.zeros(size, dtype=torch.int32) for _ in range(_NUM_HOST_BUFFERS)]
        self._hosts = hosts if device.type == "cpu" else [host.pin_memory() for host in hosts]
        self._arrays: list[Array] = [host.numpy() for host in self._hosts]
        self._current = 0

    def send(self, slots_B: Ints, num_rows: int) -> None:
        rows_T, tiles_G3 = build_tiles(slots_B, self._tile_rows)
        assert len(tiles_G3) <= count_tiles(num_rows, self._num_slots, self._tile_rows)
        self._current = (self._current + 1) % _NUM_HOST_BUFFERS
        array, first_row = self._arrays[self._current], 3 * self._max_tiles
        array[:first_row] = 0
        array[: tiles_G3.size] = tiles_G3.ravel()
        array[first_row : first_row + len(rows_T)] = rows_T
        self._device.copy_(self._hosts[self._current], non_blocking=True)

    def view(self, num_rows: int) -> LoraPlan:
        tiles = count_tiles(num_rows, self._num_slots, self._tile_rows)
        return LoraPlan(
            rows_T=self._device[3 * self._max_tiles :],
            tiles_G3=self._device[: 3 * tiles].view(-1, 3),
            tile_rows=self._tile_rows,
        )


def _group_targets(targets: Iterable[LoraTarget]) -> Mapping[str, list[LoraTarget]]:
    grouped: dict[str, list[LoraTarget]] = {}
    for target in targets:
        grouped.setdefault(target.param_name, []).append(target)
    return grouped
