"""Unmerged LoRA adapters of a model runner: host copies, device slots, and the rows of each step by adapter.

Slots of a projection are part of the grouped LoRA kernels' inputs; the projection's ``adapter`` adds their products to
its output, and ``served_lora`` of an MoE layer those of its experts. Those of the output layer are added to the logits
(``build_logit_adapter``). Steps without adapters run as if there were none.

Shapes: as in ``kernels.lora.grouped`` and ``kernels.lora.experts``; B sequences, n rows of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine.lora import LoraBatch, LoraShape
from miles.backends.native.engine.request import Ints
from miles.core.errors import UsageError
from miles.core.types import Array
from miles.kernels.fused.lm_head import LogitAdapter
from miles.kernels.lora.experts import ExpertFactors, ExpertLora
from miles.kernels.lora.grouped import (
    LoraPlan,
    LoraSlots,
    add_gated_lora,
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
from miles.models.layers.moe import MoeMlp
from miles.models.lora.factors import LoraFactors
from miles.models.lora.layout import LORA_A, LORA_B, factor_name, group_targets
from miles.models.lora.targets import EXPERTS, LM_HEAD_PARAM, LoraTarget, list_targets, targets_from_modules
from miles.models.parallel.tp_sharding import compute_tp_shards
from miles.models.spec import Activation, AdapterSpec, DecoderSpec

__all__ = ["LoraRunner", "count_slot_bytes", "list_served_modules"]

# Attention in the engine absorbs this projection of MLA into queries and outputs.
_ABSORBED = ".mla.kv_b.weight"
_NUM_HOST_BUFFERS = 3
# Tiles from which a shrink launch has enough programs without dividing the inputs.
_MANY_TILES = 128


def list_served_modules(spec: DecoderSpec, words: Sequence[str], numerics: Numerics) -> tuple[str, ...]:
    """Return the modules that adapters may target: all but routed experts and the output layer, or those that ``words``
    match: names, their last parts, ``experts``, and ``all`` for the former.

    UsageError for a word that names no module, or one that is not served beside the weights.
    """
    if isinstance(spec, HfAdapterSpec):
        raise UsageError("adapters are not served with a model run by transformers; remove --enable-lora.")
    targets = [target for target in list_targets(spec) if not target.is_vision]
    served = [t for t in targets if numerics.batch_invariant or not t.param_name.endswith(_ABSORBED)]
    words = words or ("all",)
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
    if word in ("all", "all-linear"):
        return not target.num_experts and not target.is_head
    return word in (target.short_name, target.module) or (word == EXPERTS and target.num_experts > 0)


def count_slot_bytes(spec: DecoderSpec, shape: LoraShape, itemsize: int) -> int:
    """Return the memory of all slots of one rank's decoder."""
    targets = targets_from_modules(spec, shape.modules)
    values = sum((target.inputs + target.outputs) * max(1, target.num_experts) for target in targets)
    return shape.num_slots * shape.max_rank * itemsize * values


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

    def add_gated(self, y_TN: Tensor, x_TI: Tensor, activation: Activation) -> Tensor:
        """Add the adapters to gate and up, and apply the gated activation."""
        assert self._step.plan is not None
        return add_gated_lora(y_TN, x_TI, self.slots, self._step.plan, activation, numerics=self.module.numerics)


@dataclass(slots=True)
class _Experts:
    """The slots of one MoE layer: those of its first projection and of ``down``."""

    module: MoeMlp
    first: ExpertFactors | None = None
    down: ExpertFactors | None = None

    def attach(self, plan: LoraPlan | None) -> None:
        """Let the layer apply the adapters of a step, or none."""
        lora = None
        if plan is not None:
            lora = ExpertLora(first=self.first, down=self.down, slots_T=plan.slots_T)
        self.module.served_lora = lora


@dataclass(frozen=True, slots=True)
class _HostFactors:
    """This rank's factors of one projection as its slots have them, and the rank and scale of each target.

    ``a`` and ``b`` are [P, r, I] and [O, r], of experts [P, E, r, I] and [P, E, O, r].
    """

    a: Tensor
    b: Tensor
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
        self._full_targets = group_targets(targets_from_modules(full_spec, shape.modules))
        self._shards = compute_tp_shards(replace(full_spec, quantization=None, adapters=adapters)) if world > 1 else {}
        targets = group_targets(targets_from_modules(decoder.spec, shape.modules))
        head = targets.pop(LM_HEAD_PARAM, None)
        self._head = None if head is None else self._build_slots(head)
        self._projections = {
            name: self._build_projection(decoder, name, own) for name, own in targets.items() if not own[0].num_experts
        }
        self._experts: dict[str, _Experts] = {}
        self._expert_slots = {
            name: self._build_experts(decoder, name, own) for name, own in targets.items() if own[0].num_experts
        }
        self._host: dict[int, dict[str, _HostFactors]] = {}
        self._slots_T: Ints = np.zeros(0, np.int64)
        # Of decode steps, and of the sampled rows of steps with prefill, whose tokens have plans by the rows of a tile.
        self._static = self._build_static_plans(max_rows, choose_tile_rows(1, device, self._numerics))
        self._prefill_plans: dict[int, _StaticPlans] = {}
        self.attach(True)  # norms in front of quantized projections keep what adapters read
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            layer.fuse_quantization()
        self.attach(False)

    def _build_projection(self, decoder: Decoder, name: str, targets: Sequence[LoraTarget]) -> _Projection:
        module = decoder.get_submodule(name.removesuffix(".weight"))
        assert isinstance(module, Linear), f"{name} is not a projection"
        return _Projection(module, self._build_slots(targets), targets, self._step)

    def _build_slots(self, targets: Sequence[LoraTarget]) -> LoraSlots:
        spans = tuple((target.piece.start, target.piece.stop) for target in targets)
        slots, rank = self._shape.num_slots, self._shape.max_rank
        factory = {"device": self._device, "dtype": self._dtype}
        outputs = sum(stop - start for start, stop in spans)
        return LoraSlots(
            a_SPRI=torch.zeros(slots, len(spans), rank, targets[0].inputs, **factory),
            b_SOR=torch.zeros(slots, outputs, rank, **factory),
            ranks_SP=torch.zeros(slots, len(spans), dtype=torch.int32, device=self._device),
            scales_SP=torch.zeros(slots, len(spans), dtype=torch.float32, device=self._device),
            columns_C4=torch.from_numpy(split_columns(spans)).to(self._device),
            spans=spans,
        )

    def _build_experts(self, decoder: Decoder, name: str, targets: Sequence[LoraTarget]) -> ExpertFactors:
        path, _, attribute = name.rpartition(".")
        module = decoder.get_submodule(path)
        assert isinstance(module, MoeMlp), f"{name} is not a tensor of experts"
        slots, rank = self._shape.num_slots, self._shape.max_rank
        count, outputs = targets[0].num_experts, targets[0].outputs
        factory = {"device": self._device, "dtype": self._dtype}
        factors = ExpertFactors(
            a_SPXRI=torch.zeros(slots, len(targets), count, rank, targets[0].inputs, **factory),
            b_SPXOR=torch.zeros(slots, len(targets), count, outputs, rank, **factory),
            first_column=targets[0].rows[0],
            ranks_SP=torch.zeros(slots, len(targets), dtype=torch.int32, device=self._device),
            scales_SP=torch.zeros(slots, len(targets), dtype=torch.float32, device=self._device),
        )
        experts = self._experts.setdefault(path, _Experts(module))
        if attribute == "down":
            experts.down = factors
        else:
            experts.first = factors
        return factors

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
        width, first_target = max(ranks), targets[0]
        stack = (first_target.num_experts,) if first_target.num_experts else ()
        a = torch.zeros(len(own), *stack, width, first_target.inputs, dtype=self._dtype)
        # Experts of a layer have targets with equal outputs; those of other projections are one after the other.
        outputs = [target.outputs for target in targets]
        b = torch.zeros(*((len(own), *stack, outputs[0]) if stack else (sum(outputs),)), width, dtype=self._dtype)
        places = list(b.unbind()) if stack else list(b.split(outputs))
        for i, each in enumerate(own):
            if each is not None:
                a[i, ..., : each.rank, :].copy_(each.a_rI)
                places[i][..., : each.rank].copy_(each.b_Or)
        if self._world > 1:
            a_shard, b_shard = (self._shards[factor_name(name, factor)] for factor in (LORA_A, LORA_B))
            a = a_shard.shard(a.flatten(0, 1), self._rank, self._world).unflatten(0, a.shape[:2])
            if stack:
                b = b_shard.shard(b.flatten(0, 1), self._rank, self._world).unflatten(0, b.shape[:2])
            else:
                b = b_shard.shard(b, self._rank, self._world)
        if self._device.type != "cpu":
            a, b = a.pin_memory(), b.pin_memory()
        return _HostFactors(a, b, ranks, tuple(0.0 if each is None else each.scale for each in own))

    # -- a step -----------------------------------------------------------------------------

    @torch.no_grad()
    def load_slots(self, batch: LoraBatch) -> None:
        """Copy the adapters that a step loads into their slots; nothing waits for the device."""
        for uid, slot in zip(*(values.tolist() for values in batch.loads), strict=True):
            found = self._host[uid]
            dense = {name: projection.slots for name, projection in self._projections.items()}
            if self._head is not None:
                dense[LM_HEAD_PARAM] = self._head
            for name, slots in dense.items():
                places = slots.a_SPRI[slot], slots.b_SOR[slot]
                self._load_slot(places, slots.ranks_SP[slot], slots.scales_SP[slot], found.get(name))
            for name, factors in self._expert_slots.items():
                assert factors.ranks_SP is not None and factors.scales_SP is not None
                places = factors.a_SPXRI[slot], factors.b_SPXOR[slot]
                self._load_slot(places, factors.ranks_SP[slot], factors.scales_SP[slot], found.get(name))

    def _load_slot(
        self, places: tuple[Tensor, Tensor], ranks_P: Tensor, scales_P: Tensor, found: _HostFactors | None
    ) -> None:
        if found is None:
            ranks_P.zero_()
            return
        width = found.b.shape[-1]
        places[0][..., :width, :].copy_(found.a.to(self._device, non_blocking=True))
        places[1][..., :width].copy_(found.b.to(self._device, non_blocking=True))
        ranks_P.copy_(torch.tensor(found.ranks, dtype=torch.int32), non_blocking=True)
        scales_P.copy_(torch.tensor(found.scales), non_blocking=True)

    def build_plan(self, batch: LoraBatch, counts_B: Ints) -> LoraPlan:
        """Return the plan of an eager step whose sequences compute so many tokens each."""
        self._slots_T = np.repeat(batch.slots_B, counts_B)
        return self._build_row_plan(self._slots_T)

    def build_logit_adapter(self, rows_R: Ints | None = None, *, num_sampled: int = 0) -> LogitAdapter | None:
        """Return what adds the step's adapters of the output layer to the logits of these rows; None if it has none.

        Without rows they are all rows of the step, as in CUDA graphs; in those of steps with prefill ``num_sampled``.
        """
        head, plan = self._head, self._step.plan
        if head is None or plan is None:
            return None
        if num_sampled:
            plan = self._static.view(num_sampled)
        if rows_R is not None:
            plan = self._build_row_plan(self._slots_T[rows_R])
        return lambda logits_RV, hidden_RD: add_grouped_lora(logits_RV, hidden_RD, head, plan, numerics=self._numerics)

    def _build_row_plan(self, slots_T: Ints) -> LoraPlan:
        """Return the plan of rows whose slots are given."""
        tile_rows = choose_tile_rows(len(slots_T), self._device, self._numerics)
        rows_T, tiles_G3 = build_tiles(slots_T, tile_rows)
        packed = torch.from_numpy(np.concatenate((tiles_G3.ravel(), rows_T, slots_T.astype(np.int32))))
        if self._device.type != "cpu":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        tiles, rows, slots = packed.split((tiles_G3.size, len(rows_T), len(slots_T)))
        splits = None if len(tiles_G3) < _MANY_TILES else 1
        return LoraPlan(rows_T=rows, tiles_G3=tiles.view(-1, 3), tile_rows=tile_rows, splits=splits, slots_T=slots)

    def _build_static_plans(self, max_rows: int, tile_rows: int) -> _StaticPlans:
        return _StaticPlans(max_rows, self._shape.num_slots, self._device, tile_rows)

    def reserve_prefill_plans(self, max_tokens: int) -> None:
        """Allocate the plans of CUDA graphs of steps with prefill, of up to ``max_tokens`` tokens."""
        for num_tokens in (1, max_tokens):
            tile_rows = choose_tile_rows(num_tokens, self._device, self._numerics)
            self._prefill_plans[tile_rows] = self._build_static_plans(max_tokens, tile_rows)

    def _get_prefill_plans(self, num_tokens: int) -> _StaticPlans:
        return self._prefill_plans[choose_tile_rows(num_tokens, self._device, self._numerics)]

    def send_prefill_plan(
        self, batch: LoraBatch, counts_B: Ints, rows_D: Ints, *, num_tokens: int, num_rows: int
    ) -> None:
        """Copy the plans of a step with prefill, which samples from ``rows_D``, to where its CUDA graph reads them."""
        slots_T = np.repeat(batch.slots_B, counts_B)
        self._get_prefill_plans(num_tokens).send(slots_T, num_tokens)
        self._static.send(slots_T[rows_D], num_rows)

    def send_static_plan(self, batch: LoraBatch, num_rows: int) -> None:
        """Copy the plan of a decode step to where its CUDA graph of ``num_rows`` rows reads it."""
        self._static.send(batch.slots_B, num_rows)

    def clear_static_plan(self) -> None:
        """Let no row of a CUDA graph have an adapter: the rows of the last step may be more than the graph has."""
        for plans in (self._static, *self._prefill_plans.values()):
            plans.send(np.zeros(0, np.int64), 0)

    def use_static_plan(self, num_rows: int) -> None:
        """Let the projections read the plan of CUDA graphs with ``num_rows`` rows; 0 is a graph without adapters."""
        self.use_plan(self._static.view(num_rows) if num_rows else None)

    def use_prefill_plan(self, num_tokens: int) -> None:
        """Let the projections read the plan of CUDA graphs of steps with prefill of so many tokens."""
        self.use_plan(self._get_prefill_plans(num_tokens).view(num_tokens))

    def use_plan(self, plan: LoraPlan | None) -> None:
        """Let the projections read this plan; None is a step without adapters."""
        self._step.plan = plan
        self.attach(plan is not None)
        for experts in self._experts.values():
            experts.attach(plan)

    def attach(self, attached: bool) -> None:
        """Add the adapters to the projections, or remove them: without any, layers fuse what is behind a projection."""
        if attached != self._attached:
            for projection in self._projections.values():
                projection.module.adapter = projection if attached else None
                projection.module.gated_adapter = projection.add_gated if attached else None
            self._attached = attached


class _StaticPlans:
    """The plans of CUDA graphs: a buffer on the device, several in pinned host memory; padding rows have no adapter."""

    def __init__(self, max_rows: int, num_slots: int, device: torch.device, tile_rows: int) -> None:
        self._num_slots = num_slots
        self._tile_rows = tile_rows
        self._max_tiles = count_tiles(max_rows, num_slots, self._tile_rows)
        self._max_rows = max_rows
        size = 3 * self._max_tiles + 2 * max_rows
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        hosts = [torch.zeros(size, dtype=torch.int32) for _ in range(_NUM_HOST_BUFFERS)]
        self._hosts = hosts if device.type == "cpu" else [host.pin_memory() for host in hosts]
        self._arrays: list[Array] = [host.numpy() for host in self._hosts]
        self._current = 0

    def send(self, slots_B: Ints, num_rows: int) -> None:
        slots_T = np.full(num_rows, -1, np.int64)
        slots_T[: len(slots_B)] = slots_B
        rows_T, tiles_G3 = build_tiles(slots_T, self._tile_rows)
        assert len(tiles_G3) <= count_tiles(num_rows, self._num_slots, self._tile_rows)
        self._current = (self._current + 1) % _NUM_HOST_BUFFERS
        array, first_row = self._arrays[self._current], 3 * self._max_tiles
        array[:first_row] = 0
        array[: tiles_G3.size] = tiles_G3.ravel()
        array[first_row : first_row + len(rows_T)] = rows_T
        array[first_row + self._max_rows :] = -1  # rows beyond those of the step are padding
        array[first_row + self._max_rows :][: len(slots_B)] = slots_B
        self._device.copy_(self._hosts[self._current], non_blocking=True)

    def view(self, num_rows: int) -> LoraPlan:
        tiles, first_row = count_tiles(num_rows, self._num_slots, self._tile_rows), 3 * self._max_tiles
        return LoraPlan(
            rows_T=self._device[first_row : first_row + self._max_rows],
            tiles_G3=self._device[: 3 * tiles].view(-1, 3),
            tile_rows=self._tile_rows,
            slots_T=self._device[first_row + self._max_rows :],
        )
