"""Multi-LoRA training: in one packed batch each segment of rows has its own adapter, and its own gradients.

The base weights are frozen: their part of backward is the gradient of the input alone. Forward is the grouped LoRA of
the engine (``kernels.lora.grouped``), so that a row's result depends on its adapter only. Backward reduces the
gradients of the factors over the rows of one segment after the other; what else is in the batch does not enter them.
Routed experts are the same for rows sorted by expert (``kernels.lora.experts``): each row has its adapter's factors of
its expert.

Shapes: T rows of the batch, I inputs, N outputs of a projection, P targets fused in it, O outputs of a target, r rank,
X = P r, S segments' rows, E experts, R rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.lora.experts import ExpertFactors, ExpertLora
from miles.kernels.lora.grouped import (
    LoraPlan,
    LoraSlots,
    add_grouped_lora,
    build_tiles,
    choose_tile_rows,
    split_columns,
)
from miles.kernels.moe.grouped_gemm import SortedRows, grouped_linear
from miles.kernels.numerics import Numerics
from miles.models.decoder import Decoder
from miles.models.layers.linear import Linear
from miles.models.layers.moe import MoeMlp
from miles.models.lora.targets import LoraTarget, targets_from_modules

__all__ = ["AdapterFactors", "GradientSum", "LoraSegment", "MultiLora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFactors:
    """The factors of one adapter by module name, of experts for each of them, and the scale of their products."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    scale: float
    rank: int


GradientSum = dict[str, tuple[Tensor, Tensor]]
"""Gradients of the factors by module name, in float32."""


@dataclass(slots=True, kw_only=True)
class LoraSegment:
    """Neighbouring rows of one adapter; with ``grads`` their gradients are written there in backward."""

    adapter: AdapterFactors
    start: int
    stop: int
    grads: GradientSum | None = None


@dataclass(frozen=True, slots=True)
class _SlotFactors:
    """The factors of one segment's adapter for a projection, in the dtype of the rows; None without any target."""

    a_XI: Tensor
    b_Or: tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Batch:
    """The batch that is computed now: its segments, the rows by slot, and an input that gradients are recorded for."""

    segments: Sequence[LoraSegment]
    adapters: list[AdapterFactors]
    slot_of: list[int]
    plan: LoraPlan
    slots_T: Tensor
    anchor: Tensor
    factors: dict[str, list[_SlotFactors]] = field(default_factory=dict)


class MultiLora:
    """The adapters of a decoder's projections in training. Attached only while a batch is computed."""

    def __init__(self, decoder: Decoder, modules: Sequence[str]) -> None:
        self._numerics = decoder.numerics
        self.targets = targets_from_modules(decoder.spec, modules)
        grouped: dict[str, list[LoraTarget]] = {}
        for target in self.targets:
            if not target.is_head:  # which the trainer applies to the logits
                grouped.setdefault(target.param_name, []).append(target)
        self._projections = [_Projection(decoder, n, own) for n, own in grouped.items() if not own[0].num_experts]
        self._experts = [_Experts(decoder, name, own) for name, own in grouped.items() if own[0].num_experts]

    @contextmanager
    def use(self, segments: Sequence[LoraSegment], *, device: torch.device) -> Iterator[None]:
        """Apply the adapters of these segments, which cover all rows, to what is computed inside."""
        batch = _build_batch(segments, device, self._numerics)
        for projection in self._projections:
            projection.module.adapter = _Applied(projection, batch)
        for experts in self._experts:
            experts.attach(batch)
        try:
            yield
        finally:
            for projection in self._projections:
                projection.module.adapter = None
            for experts in self._experts:
                experts.detach()


class _Projection:
    """A projection of the decoder and its targets."""

    def __init__(self, decoder: Decoder, name: str, targets: Sequence[LoraTarget]) -> None:
        module = decoder.get_submodule(name.removesuffix(".weight"))
        assert isinstance(module, Linear), f"{name} is not a projection"
        self.module = module
        self.name = name
        self.modules = tuple(target.module for target in targets)
        self.spans = tuple((target.piece.start, target.piece.stop) for target in targets)
        self.inputs = targets[0].inputs
        self.columns_C4 = torch.from_numpy(split_columns(self.spans))

    def build_slots(self, adapters: Sequence[AdapterFactors], like: Tensor) -> LoraSlots:
        """Stack the factors of all adapters; a target that an adapter lacks has rank 0."""
        most, targets = max(adapter.rank for adapter in adapters), len(self.modules)
        outputs = sum(stop - start for start, stop in self.spans)
        a_SPRI = like.new_zeros(len(adapters), targets, most, self.inputs)
        b_SOR = like.new_zeros(len(adapters), outputs, most)
        ranks, scales = np.zeros((len(adapters), targets), np.int32), np.zeros((len(adapters), targets), np.float32)
        for slot, adapter in enumerate(adapters):
            first = 0
            for target, (module, (start, stop)) in enumerate(zip(self.modules, self.spans, strict=True)):
                if (found := adapter.factors.get(module)) is not None:
                    a_SPRI[slot, target, : adapter.rank].copy_(found[0])
                    b_SOR[slot, first : first + stop - start, : adapter.rank].copy_(found[1])
                    ranks[slot, target], scales[slot, target] = adapter.rank, adapter.scale
                first += stop - start
        return LoraSlots(
            a_SPRI=a_SPRI,
            b_SOR=b_SOR,
            ranks_SP=torch.from_numpy(ranks).to(like.device),
            scales_SP=torch.from_numpy(scales).to(like.device),
            columns_C4=self.columns_C4.to(like.device),
            spans=self.spans,
        )


class _Experts:
    """A stacked tensor of routed experts and its targets."""

    def __init__(self, decoder: Decoder, name: str, targets: Sequence[LoraTarget]) -> None:
        path, _, self._attribute = name.rpartition(".")
        module = decoder.get_submodule(path)
        assert isinstance(module, MoeMlp), f"{name} is not a tensor of experts"
        self._module = module
        self._targets = tuple(targets)
        self.modules = tuple(target.module for target in targets)
        self.spans = tuple(target.rows for target in targets)
        self.num_experts = targets[0].num_experts

    def attach(self, batch: _Batch) -> None:
        """Apply the adapters of a batch, with gradients or without."""

        def add(y_RN: Tensor, x_RI: Tensor, rows: SortedRows) -> Tensor:
            return _GroupedExpertLora.apply(y_RN, x_RI, batch.anchor, self, batch, rows)  # pyright: ignore[reportReturnType]

        self._module.adapters[self._attribute] = add
        self._module.adapts_inference = True

    def detach(self) -> None:
        self._module.adapters.pop(self._attribute, None)
        self._module.adapts_inference = False

    def add(self, y_RN: Tensor, x_RI: Tensor, batch: _Batch, rows: SortedRows) -> Tensor:
        """Return the output with the products of each row's factors."""
        lora = ExpertLora(first=self._build_factors(batch.adapters, x_RI), down=None, slots_T=batch.slots_T)
        apply, _ = lora.build_row_adapters(self.num_experts, self._module.numerics)
        assert apply is not None
        return apply(y_RN.clone(), x_RI, rows)

    def _build_factors(self, adapters: Sequence[AdapterFactors], like: Tensor) -> ExpertFactors:
        """Stack the factors of all adapters; a target that an adapter lacks has rank 0."""
        most, target = max(adapter.rank for adapter in adapters), self._targets[0]
        sizes = len(adapters), len(self._targets), self.num_experts
        a_SPERI = like.new_zeros(*sizes, most, target.inputs)
        b_SPEOR = like.new_zeros(*sizes, target.outputs, most)
        ranks, scales = np.zeros(sizes[:2], np.int32), np.zeros(sizes[:2], np.float32)
        for slot, adapter in enumerate(adapters):
            for number, module in enumerate(self.modules):
                if (found := adapter.factors.get(module)) is not None:
                    a_SPERI[slot, number, :, : adapter.rank].copy_(found[0])
                    b_SPEOR[slot, number, :, :, : adapter.rank].copy_(found[1])
                    ranks[slot, number], scales[slot, number] = adapter.rank, adapter.scale
        return ExpertFactors(
            a_SPXRI=a_SPERI,
            b_SPXOR=b_SPEOR,
            first_column=self.spans[0][0],
            ranks_SP=torch.from_numpy(ranks).to(like.device),
            scales_SP=torch.from_numpy(scales).to(like.device),
        )


def _build_batch(segments: Sequence[LoraSegment], device: torch.device, numerics: Numerics) -> _Batch:
    adapters: list[AdapterFactors] = []
    slot_of: list[int] = []
    for segment in segments:
        known = [i for i, adapter in enumerate(adapters) if adapter is segment.adapter]
        slot_of.append(known[0] if known else len(adapters))
        if not known:
            adapters.append(segment.adapter)
    lengths = [segment.stop - segment.start for segment in segments]
    slots_T = np.repeat(np.array(slot_of, np.int64), lengths)
    tile_rows = choose_tile_rows(len(slots_T), device, numerics)
    rows_T, tiles_G3 = build_tiles(slots_T, tile_rows)
    plan = LoraPlan(
        rows_T=torch.from_numpy(rows_T).to(device),
        tiles_G3=torch.from_numpy(tiles_G3).to(device),
        tile_rows=tile_rows,
        splits=1,
    )
    anchor = torch.zeros((), device=device, requires_grad=True)
    return _Batch(segments, adapters, slot_of, plan, torch.from_numpy(slots_T).to(device, torch.int32), anchor)


class _Applied:
    """The ``adapter`` of a projection while a batch is computed."""

    def __init__(self, projection: _Projection, batch: _Batch) -> None:
        self._projection = projection
        self._batch = batch

    def __call__(self, y_TN: Tensor, x_TI: Tensor) -> Tensor:
        return _GroupedLora.apply(y_TN, x_TI, self._batch.anchor, self._projection, self._batch)  # pyright: ignore[reportReturnType]


class _GroupedLora(torch.autograd.Function):
    """Adds the products of each row's factors. The anchor makes autograd record the first layers, too."""

    @staticmethod
    def forward(ctx: Any, y_TN: Tensor, x_TI: Tensor, anchor: Tensor, projection: _Projection, batch: _Batch) -> Tensor:
        ctx.projection, ctx.batch = projection, batch
        ctx.save_for_backward(x_TI)
        ctx.mark_dirty(y_TN)
        slots = projection.build_slots(batch.adapters, x_TI)
        add_grouped_lora(y_TN, x_TI, slots, batch.plan, numerics=projection.module.numerics)
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_TI,) = ctx.saved_tensors
        projection: _Projection = ctx.projection
        needs_x = ctx.needs_input_grad[1]
        grad_TI = torch.zeros_like(x_TI) if needs_x else None
        for segment in ctx.batch.segments:
            if segment.grads is not None:
                rows = slice(segment.start, segment.stop)
                grad_SI = None if grad_TI is None else grad_TI[rows]
                _add_gradients(projection, segment, segment.grads, x_TI[rows], grad_TN[rows], grad_SI)
        return grad_TN, grad_TI, None, None, None


def _add_gradients(
    projection: _Projection,
    segment: LoraSegment,
    grads: GradientSum,
    x_SI: Tensor,
    grad_SN: Tensor,
    grad_SI: Tensor | None,
) -> None:
    """Write the gradients of a segment's factors, and add that of its input to ``grad_SI``."""
    adapter = segment.adapter
    own = [
        (module, span, *adapter.factors[module])
        for module, span in zip(projection.modules, projection.spans, strict=True)
        if module in adapter.factors
    ]
    if not own:
        return
    a_XI = torch.cat([a_rI.to(x_SI.dtype) for _, _, a_rI, _ in own])
    xa_SX = (x_SI @ a_XI.T).mul_(adapter.scale)
    back = [grad_SN[:, start:stop] @ b_Or.to(grad_SN.dtype) for _, (start, stop), _, b_Or in own]
    back_SX = torch.cat(back, 1).mul_(adapter.scale)
    if grad_SI is not None:
        grad_SI.add_(back_SX @ a_XI)
    grad_a_XI = (back_SX.T @ x_SI).float()
    for number, (module, (start, stop), _, _) in enumerate(own):
        part = slice(number * adapter.rank, (number + 1) * adapter.rank)
        grads[module] = (grad_a_XI[part], (grad_SN[:, start:stop].T @ xa_SX[:, part]).float())


class _GroupedExpertLora(torch.autograd.Function):
    """``_GroupedLora`` for rows sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any, y_RN: Tensor, x_RI: Tensor, anchor: Tensor, experts: _Experts, batch: _Batch, rows: SortedRows
    ) -> Tensor:
        ctx.experts, ctx.batch = experts, batch
        ctx.rows = rows
        ctx.save_for_backward(x_RI)
        return experts.add(y_RN, x_RI, batch, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_RI,) = ctx.saved_tensors
        rows: SortedRows = ctx.rows
        grad_RI = torch.zeros_like(x_RI) if ctx.needs_input_grad[1] else None
        token_R = rows.order_R // rows.per_token
        for segment in ctx.batch.segments:
            if segment.grads is not None:
                index_S = ((token_R >= segment.start) & (token_R < segment.stop)).nonzero().flatten()
                _add_expert_gradients(ctx.experts, segment, segment.grads, x_RI, grad_RN, grad_RI, rows, index_S)
        return grad_RN, grad_RI, None, None, None, None


def _add_expert_gradients(
    experts: _Experts,
    segment: LoraSegment,
    grads: GradientSum,
    x_RI: Tensor,
    grad_RN: Tensor,
    grad_RI: Tensor | None,
    rows: SortedRows,
    index_S: Tensor,
) -> None:
    """Write the gradients of a segment's factors of all experts, and add that of its input to ``grad_RI``."""
    adapter = segment.adapter
    group_S = rows.group_R.index_select(0, index_S)
    groups_E = torch.arange(experts.num_experts, device=group_S.device, dtype=group_S.dtype)
    own_rows = SortedRows(
        order_R=index_S,
        place_R=index_S,
        group_R=group_S,
        ends_E=torch.searchsorted(group_S, groups_E, right=True, out_int32=True),
        per_token=1,
    )
    x_SI, grad_SN = x_RI.index_select(0, index_S), grad_RN.index_select(0, index_S)
    for module, (start, stop) in zip(experts.modules, experts.spans, strict=True):
        if (found := adapter.factors.get(module)) is None:
            continue
        with torch.enable_grad():
            x, a, b = (tensor.detach().to(x_SI.dtype).requires_grad_() for tensor in (x_SI, *found))
            low_SO = grouped_linear(grouped_linear(x, a, own_rows) * adapter.scale, b, own_rows)
        grad_x, grad_a, grad_b = torch.autograd.grad(low_SO, (x, a, b), grad_SN[:, start:stop].contiguous())
        if grad_RI is not None:
            grad_RI.index_add_(0, index_S, grad_x)
        grads[module] = (grad_a.float(), grad_b.float())
