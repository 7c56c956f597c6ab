"""LoRA on routed experts in inference (multi-LoRA MoE): each row has the factors of its adapter and its expert.

    y[q] += round(round(round(x[q] A_se^T) * scale_s) B_se^T)        s is the adapter slot of row q, e its expert

A row is a token's choice. Rows of one (adapter, expert) are neighbours in tiles; a kernel finds these on the device, as
the router's choices are known there only. The number of tiles depends on the number of rows, experts and slots, not on
the choices, so all launches can be captured in a CUDA graph. Results are rounded as in
``models.layers.lora.add_expert_lora``, and a row's do not depend on the rows beside it.

Shapes: T tokens, k choices of a token, Q = T k rows, E experts, S slots, P targets fused in a projection, I inputs, N
outputs of a projection, O outputs of a target, R the largest rank, G tiles, X = E matrices, or 1 that experts share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from miles.kernels.fused.gemv import linear
from miles.kernels.lora import experts_triton as kernels
from miles.kernels.lora.grouped import COLUMNS, DECODE_ROWS, PREFILL_ROWS, LoraPlan, choose_splits, choose_tile_rows
from miles.kernels.moe.grouped_gemm import SortedRows
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.triton_compat import device_guard, pdl_options, triton, use_triton_inference

__all__ = [
    "ExpertFactors",
    "ExpertLora",
    "add_expert_rows",
    "add_sorted_rows",
    "choose_expert_tile_rows",
    "plan_expert_tiles",
]

# Rows of an expert from which tiles have more rows.
_MIN_PREFILL_ROWS = 64
# Tiles from which a shrink launch has enough programs without dividing the inputs.
_MANY_TILES = 128
_DEPTH, _SHORT_DEPTH = 128, 64
_PIPELINE_BYTES = 60 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFactors:
    """The factors of all slots for one projection of the experts, whose targets cover columns from ``first_column``.

    Without ``ranks_SP`` and ``scales_SP`` there is one slot, whose targets have the largest rank, and ``scale``.
    """

    a_SPXRI: Tensor
    b_SPXOR: Tensor
    first_column: int
    scale: float = 1.0
    ranks_SP: Tensor | None = None
    scales_SP: Tensor | None = None

    def list_spans(self) -> list[tuple[int, int]]:
        """List the columns of each target."""
        outputs = self.b_SPXOR.shape[3]
        starts = [self.first_column + target * outputs for target in range(self.b_SPXOR.shape[1])]
        return [(start, start + outputs) for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLora:
    """The adapters of a layer's experts in one forward: ``slots_T`` is the slot of each token, -1 without an adapter.

    Without ``slots_T`` every token has slot 0. ``first`` and ``down`` are None if no adapter targets them.
    """

    first: ExpertFactors | None
    down: ExpertFactors | None
    slots_T: Tensor | None = None

    @property
    def num_slots(self) -> int:
        factors = self.first or self.down
        assert factors is not None
        return len(factors.a_SPXRI)

    def build_row_adapters(
        self, num_experts: int, numerics: Numerics
    ) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]:
        """Return what adds to the rows of both projections, sorted by expert."""

        def add(factors: ExpertFactors, y_QN: Tensor, x_QI: Tensor, rows: SortedRows) -> Tensor:
            slots_Q = None if self.slots_T is None else self.slots_T[rows.order_R // rows.per_token]
            if not use_triton_inference(x_QI):
                return add_sorted_rows(y_QN, x_QI, factors, slots_Q, rows, numerics=numerics)
            plan = plan_expert_tiles(
                rows.group_R.unsqueeze(1),
                slots_Q,
                num_experts=num_experts,
                num_slots=self.num_slots,
                tile_rows=choose_tile_rows(len(y_QN), x_QI.device, numerics),
            )
            plan = replace(plan, splits=1) if numerics.batch_invariant else plan
            return add_expert_rows(y_QN.contiguous(), x_QI, factors, plan, num_experts=num_experts, per_token=1)

        first, down = (None if each is None else partial(add, each) for each in (self.first, self.down))
        return first, down


def choose_expert_tile_rows(num_rows: int, num_experts: int) -> int:
    """Return the rows of a tile in a forward of ``num_rows`` rows."""
    return DECODE_ROWS if num_rows < _MIN_PREFILL_ROWS * num_experts else PREFILL_ROWS


def plan_expert_tiles(
    experts_Tk: Tensor, slots_T: Tensor | None, *, num_experts: int, num_slots: int, tile_rows: int
) -> LoraPlan:
    """Sort rows by (adapter, expert) into tiles, without a device sync; the tiles' slots are such groups."""
    rows, groups = experts_Tk.numel(), num_experts * num_slots
    tiles = rows // tile_rows + groups
    rows_Q = torch.empty(rows, dtype=torch.int32, device=experts_Tk.device)
    tiles_G3 = torch.empty(tiles, 3, dtype=torch.int32, device=experts_Tk.device)
    with device_guard(experts_Tk):
        kernels.plan_tiles_kernel[(groups,)](
            experts_Tk.contiguous(),
            rows_Q if slots_T is None else slots_T,
            rows_Q,
            tiles_G3,
            rows,
            tiles,
            EXPERTS=num_experts,
            PER_TOKEN=experts_Tk.shape[-1],
            HAS_SLOTS=slots_T is not None,
            BLOCK=min(triton.next_power_of_2(max(rows, 16)), 2048),
            M=tile_rows,
            num_warps=4,
            **pdl_options(experts_Tk.device),
        )
    splits = None if tiles - groups + min(rows, groups) < _MANY_TILES else 1
    return LoraPlan(rows_T=rows_Q, tiles_G3=tiles_G3, tile_rows=tile_rows, splits=splits)


def add_expert_rows(
    y_QN: Tensor, x_TI: Tensor, factors: ExpertFactors, plan: LoraPlan, *, num_experts: int, per_token: int
) -> Tensor:
    """Add to each row the product of its factors, in place, by two Triton kernels; row q reads x[q // per_token]."""
    (rows, inputs), (_, targets, own_a, max_rank, _) = (len(y_QN), x_TI.shape[1]), factors.a_SPXRI.shape
    own_b, outputs = factors.b_SPXOR.shape[2:4]
    assert y_QN.is_contiguous() and y_QN.dtype == x_TI.dtype == factors.a_SPXRI.dtype, "factors have the rows' dtype"
    x_TI = x_TI.contiguous()
    width = triton.next_power_of_2(max(max_rank, 16))
    depth = min(_DEPTH if width <= _SHORT_DEPTH else _SHORT_DEPTH, triton.next_power_of_2(max(inputs, 16)))
    splits = choose_splits(inputs, max_rank) if plan.splits is None else plan.splits
    steps = triton.cdiv(triton.cdiv(inputs, depth), splits)
    stage_bytes = (plan.tile_rows + width) * depth * x_TI.dtype.itemsize
    xa_ZQX = torch.empty(splits, rows, targets * max_rank, dtype=torch.float32, device=x_TI.device)
    sizes = {"TARGETS": targets, "EXPERTS": num_experts, "MAX_RANK": max_rank, "RANK_BLOCK": width}
    sizes |= {"HAS_RANKS": factors.ranks_SP is not None, "M": plan.tile_rows}
    pdl, tiles = pdl_options(x_TI.device), len(plan.tiles_G3)
    ranks, scales = (plan.rows_T if table is None else table for table in (factors.ranks_SP, factors.scales_SP))
    with device_guard(x_TI):
        kernels.expert_shrink_kernel[(tiles, targets, splits)](
            x_TI,
            factors.a_SPXRI,
            ranks,
            plan.rows_T,
            plan.tiles_G3,
            xa_ZQX,
            rows,
            steps,
            INPUTS=inputs,
            OWN_EXPERTS=own_a,
            PER_TOKEN=per_token,
            **sizes,
            K=depth,
            num_warps=4,
            num_stages=max(2, min(4, 1 + _PIPELINE_BYTES // stage_bytes)),
            **pdl,
        )
        kernels.expert_expand_kernel[(tiles, targets * triton.cdiv(outputs, COLUMNS))](
            xa_ZQX,
            factors.b_SPXOR,
            ranks,
            scales,
            factors.scale,
            plan.rows_T,
            plan.tiles_G3,
            y_QN,
            rows,
            factors.first_column,
            y_QN.shape[1],
            OUTPUTS=outputs,
            OWN_EXPERTS=own_b,
            **sizes,
            SPLITS=splits,
            N=COLUMNS,
            num_warps=4,
            num_stages=1,
            **pdl,
        )
    return y_QN


def add_sorted_rows(
    y_QN: Tensor,
    x_QI: Tensor,
    factors: ExpertFactors,
    slots_Q: Tensor | None,
    rows: SortedRows,
    *,
    numerics: Numerics,
) -> Tensor:
    """``add_expert_rows`` in torch for rows sorted by expert: the rows of each (adapter, expert) in turn."""
    slots_Q = torch.zeros_like(rows.group_R) if slots_Q is None else slots_Q
    out_QN = y_QN.clone()
    groups = torch.stack((slots_Q.to(rows.group_R.dtype), rows.group_R), 1)
    for slot, expert in groups[groups[:, 0] >= 0].unique(dim=0).tolist():
        index_M = ((slots_Q == slot) & (rows.group_R == expert)).nonzero().flatten()
        x_MI = x_QI.index_select(0, index_M)
        for target, (start, stop) in enumerate(factors.list_spans()):
            rank = factors.a_SPXRI.shape[3] if factors.ranks_SP is None else int(factors.ranks_SP[slot, target])
            scale = factors.scale if factors.scales_SP is None else float(factors.scales_SP[slot, target])
            if rank:
                a_XRI, b_XOR = factors.a_SPXRI[slot, target], factors.b_SPXOR[slot, target]
                a_rI, b_Or = (f[expert if len(f) > 1 else 0] for f in (a_XRI, b_XOR))
                xa_Mr = linear(x_MI, a_rI[:rank], numerics=numerics) * scale
                delta_MO = linear(xa_Mr, b_Or[:, :rank].contiguous(), numerics=numerics)
                out_QN[:, start:stop].index_add_(0, index_M, delta_MO)
    return out_QN
