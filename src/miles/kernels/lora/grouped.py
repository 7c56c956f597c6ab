"""Grouped LoRA (multi-LoRA, SGMV): every row of a batch has its own adapter or none; one launch shrinks, one expands.

    y[t] += round(round(round(x[t] A_s^T) * scale_s) B_s^T)        s is the adapter slot of row t, per target

This rounds as ``models.layers.lora.add_lora`` does. Of logits (float32) the last product is not rounded, as in
``kernels.fused.lm_head``. Rows of one slot are neighbours in tiles that a plan names, so a
tile reads the factors of its slot once. A row's result depends on the row and its adapter only: neither on the rows
beside it, nor on where they are in a tile. With one split of the inputs the sums have the order of the
batch-invariant GEMM. ``add_gated_lora`` does the same in front of a gated activation, which the expand launch computes.

Slots have room for the largest rank; of a slot with a smaller one nothing more is read. Plans and slots are tensors at
fixed addresses, so the launches can be captured in a CUDA graph and replayed for other rows and other adapters.

Shapes: T rows, I inputs, N outputs of a projection, P targets fused in it, O outputs of these, S slots, R the largest
rank, r a slot's own, G tiles, C column blocks, Z splits of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.batch_invariant.linear_triton import is_mma_bitwise_equal
from miles.kernels.fused.activation import ActivationKind, gated_activation
from miles.kernels.fused.gemv import linear
from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.lora import grouped_triton as kernels
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.triton_compat import device_guard, pdl_options, triton, use_triton_inference

__all__ = [
    "LoraPlan",
    "LoraSlots",
    "add_gated_lora",
    "add_grouped_lora",
    "build_tiles",
    "choose_tile_rows",
    "count_tiles",
    "covers_gate_and_up",
    "split_columns",
]

# Rows of a tile: few adapters' rows meet in a decode step, many in a prefill.
DECODE_ROWS, PREFILL_ROWS = 16, 64
_MIN_PREFILL_ROWS = 1024
# A decode step has few tiles: the inputs of each are divided, this many at least in a split, into splits of so many
# ranks together.
_MIN_SPLIT_INPUTS, _MAX_SPLIT_RANKS = 512, 384
# Columns of an expand program (and of one that computes a gated activation of few rows), inputs of one step of a shrink
# program (and for large ranks), bytes of its pipeline.
COLUMNS, _GATED_COLUMNS = 128, 256
_DEPTH, _SHORT_DEPTH = 128, 64
_PIPELINE_BYTES = 60 << 10

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSlots:
    """The factors of all adapter slots for one projection, whose targets cover some of its columns.

    ``a_SPRI`` and ``b_SOR`` are the A factors of every target, and the B factors of all targets one after the other.
    ``ranks_SP`` are the ranks (0: the slot's adapter has no such target), ``scales_SP`` the factors of the products.
    ``columns_C4`` are column blocks of targets: target, first column of the output, first row of B, columns. ``spans``
    are the columns (start, stop) of each target, ascending.
    """

    a_SPRI: Tensor
    b_SOR: Tensor
    ranks_SP: Tensor
    scales_SP: Tensor
    columns_C4: Tensor
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPlan:
    """The rows of a step by slot: ``rows_T`` are the rows, those of one slot together, those without an adapter last.

    ``tiles_G3`` are (slot, first index into ``rows_T``, number of rows), of slot -1 for rows without an adapter; a tile
    without rows is padding. ``slots_T`` is the slot of every row, -1 without an adapter, for experts, whose tiles
    depend on the routing.
    """

    rows_T: Tensor
    tiles_G3: Tensor
    tile_rows: int
    splits: int | None = None
    slots_T: Tensor | None = None


def build_tiles(slots_T: NDArray[np.int64], tile_rows: int) -> tuple[Ints, Ints]:
    """Return the rows ordered by slot, those without an adapter last, and the tiles [G, 3] of ``tile_rows`` of them.

    >>> rows, tiles = build_tiles(np.array([1, -1, 0, 1]), 16)
    >>> rows.tolist(), tiles.tolist()
    ([2, 0, 3, 1], [[0, 0, 1], [1, 1, 2], [-1, 3, 1]])
    """
    order_T = np.argsort(slots_T, kind="stable")
    rows_T = np.roll(order_T, -int(np.searchsorted(slots_T[order_T], 0)))
    ordered_T = slots_T[rows_T]
    firsts = np.flatnonzero(np.diff(ordered_T, prepend=-2))
    counts = np.diff(firsts, append=len(ordered_T))
    tiles_per_slot = -(-counts // tile_rows)
    owner_G = np.repeat(np.arange(len(firsts)), tiles_per_slot)
    number_G = np.arange(len(owner_G)) - np.repeat(np.cumsum(tiles_per_slot) - tiles_per_slot, tiles_per_slot)
    first_G = firsts[owner_G] + number_G * tile_rows
    last_G = np.minimum(first_G + tile_rows, (firsts + counts)[owner_G])
    tiles_G3 = np.stack((ordered_T[first_G], first_G, last_G - first_G), 1)
    return rows_T.astype(np.int32), tiles_G3.astype(np.int32)


def count_tiles(num_rows: int, num_slots: int, tile_rows: int) -> int:
    """Return the most tiles that ``num_rows`` rows of ``num_slots`` slots can have."""
    return num_rows // tile_rows + min(num_rows, num_slots + 1)


def split_columns(spans: Sequence[tuple[int, int]]) -> Ints:
    """Return the column blocks [C, 4] of targets that cover these columns."""
    blocks: list[tuple[int, int, int, int]] = []
    first_row = 0
    for target, (start, stop) in enumerate(spans):
        blocks += [
            (target, column, first_row + column - start, min(COLUMNS, stop - column))
            for column in range(start, stop, COLUMNS)
        ]
        first_row += stop - start
    return np.array(blocks, np.int32).reshape(-1, 4)


def add_grouped_lora(y_TN: Tensor, x_TI: Tensor, slots: LoraSlots, plan: LoraPlan, *, numerics: Numerics) -> Tensor:
    """Add to each row with an adapter the product of its factors, in place; return ``y``."""
    if use_triton_inference(x_TI):
        return launch_grouped_lora(y_TN, x_TI, slots, plan, splits=1 if numerics.batch_invariant else plan.splits)
    return add_grouped_lora_reference(y_TN, x_TI, slots, plan, numerics=numerics)


def add_gated_lora(
    y_TN: Tensor, x_TI: Tensor, slots: LoraSlots, plan: LoraPlan, kind: ActivationKind, *, numerics: Numerics
) -> Tensor:
    """``add_grouped_lora`` to gate and up, which may change ``y``, followed by the gated activation."""
    if use_triton_inference(x_TI) and covers_gate_and_up(slots, y_TN.shape[1]) and not numerics.batch_invariant:
        return launch_gated_lora(y_TN, x_TI, slots, plan, kind)
    return gated_activation(add_grouped_lora(y_TN, x_TI, slots, plan, numerics=numerics), kind)


def covers_gate_and_up(slots: LoraSlots, outputs: int) -> bool:
    """Whether the targets are the two halves of the projection."""
    return slots.spans == ((0, outputs // 2), (outputs // 2, outputs))


def add_grouped_lora_reference(
    y_TN: Tensor, x_TI: Tensor, slots: LoraSlots, plan: LoraPlan, *, numerics: Numerics
) -> Tensor:
    """``add_grouped_lora`` in torch: the rows of each slot in turn."""
    rows_by_slot: dict[int, list[int]] = {}
    rows = plan.rows_T.tolist()
    for slot, first, count in plan.tiles_G3.tolist():
        if count and slot >= 0:
            rows_by_slot.setdefault(slot, []).extend(rows[first : first + count])
    for slot, members in rows_by_slot.items():
        index_M = torch.tensor(members, device=y_TN.device)
        x_MI, first = x_TI.index_select(0, index_M), 0
        scales, ranks = slots.scales_SP[slot].tolist(), slots.ranks_SP[slot].tolist()
        for target, (start, stop) in enumerate(slots.spans):
            last, rank = first + stop - start, ranks[target]
            if rank:
                xa_Mr = linear(x_MI, slots.a_SPRI[slot, target, :rank], numerics=numerics) * scales[target]
                multiply = linear if y_TN.dtype == x_TI.dtype else compute_logits
                delta_MO = multiply(xa_Mr, slots.b_SOR[slot, first:last, :rank].contiguous(), numerics=numerics)
                y_TN[:, start:stop].index_add_(0, index_M, delta_MO)
            first = last
    return y_TN


def launch_grouped_lora(
    y_TN: Tensor, x_TI: Tensor, slots: LoraSlots, plan: LoraPlan, *, splits: int | None = None
) -> Tensor:
    """``add_grouped_lora`` by two Triton kernels; ``splits`` of the inputs by default as many as pay off."""
    tiles, column_blocks = len(plan.tiles_G3), len(slots.columns_C4)
    if not (tiles and column_blocks and len(x_TI)):
        return y_TN
    assert y_TN.is_contiguous(), "the output is written in place"
    with device_guard(x_TI):
        xa_ZTX, sizes = _launch_shrink(y_TN, x_TI, slots, plan, splits)
        kernels.expand_kernel[(column_blocks, tiles)](
            xa_ZTX,
            slots.b_SOR,
            slots.ranks_SP,
            slots.scales_SP,
            slots.columns_C4,
            plan.rows_T,
            plan.tiles_G3,
            y_TN,
            len(x_TI),
            slots.b_SOR.shape[1],
            y_TN.shape[1],
            TARGETS=len(slots.spans),
            **sizes,
            N=COLUMNS,
        )
    return y_TN


def launch_gated_lora(
    y_TN: Tensor, x_TI: Tensor, slots: LoraSlots, plan: LoraPlan, kind: ActivationKind, *, splits: int | None = None
) -> Tensor:
    """``add_gated_lora`` by two Triton kernels."""
    tokens, size = len(y_TN), y_TN.shape[1] // 2
    out_TI = torch.empty(tokens, size, dtype=y_TN.dtype, device=y_TN.device)
    if not (len(plan.tiles_G3) and tokens):
        return out_TI
    y_TN = y_TN.contiguous()
    columns = _GATED_COLUMNS if plan.tile_rows <= DECODE_ROWS else COLUMNS
    with device_guard(x_TI):
        xa_ZTX, sizes = _launch_shrink(y_TN, x_TI, slots, plan, plan.splits if splits is None else splits)
        kernels.expand_gated_kernel[(triton.cdiv(size, columns), len(plan.tiles_G3))](
            xa_ZTX,
            slots.b_SOR,
            slots.ranks_SP,
            slots.scales_SP,
            plan.rows_T,
            plan.tiles_G3,
            y_TN,
            out_TI,
            tokens,
            size,
            ACTIVATION=kind,
            **sizes,
            N=columns,
        )
    return out_TI


def _launch_shrink(
    y_TN: Tensor, x_TI: Tensor, slots: LoraSlots, plan: LoraPlan, splits: int | None
) -> tuple[Tensor, dict[str, Any]]:
    """Return the rows times A of each split and target, and the options of the expand launch that follows."""
    assert x_TI.dtype == slots.a_SPRI.dtype, "factors have the dtype of the rows"
    assert y_TN.dtype in (x_TI.dtype, torch.float32), "outputs have it too, or are logits"
    (tokens, inputs), (_, targets, max_rank, _) = x_TI.shape, slots.a_SPRI.shape
    x_TI = x_TI.contiguous()
    width = triton.next_power_of_2(max(max_rank, 16))
    depth = min(_DEPTH if width <= _SHORT_DEPTH else _SHORT_DEPTH, triton.next_power_of_2(max(inputs, 16)))
    splits = choose_splits(inputs, max_rank) if splits is None else splits
    stage_bytes = (plan.tile_rows + width) * depth * x_TI.dtype.itemsize
    xa_ZTX = torch.empty(splits, tokens, targets * max_rank, dtype=torch.float32, device=x_TI.device)
    sizes = {"MAX_RANK": max_rank, "RANK_BLOCK": width, "M": plan.tile_rows, "num_warps": 4}
    pdl = pdl_options(x_TI.device)
    kernels.shrink_kernel[(splits, targets, len(plan.tiles_G3))](
        x_TI,
        slots.a_SPRI,
        slots.ranks_SP,
        plan.rows_T,
        plan.tiles_G3,
        xa_ZTX,
        tokens,
        triton.cdiv(triton.cdiv(inputs, depth), splits),
        INPUTS=inputs,
        TARGETS=targets,
        **sizes,
        K=depth,
        num_stages=max(2, min(4, 1 + _PIPELINE_BYTES // stage_bytes)),
        **pdl,
    )
    return xa_ZTX, {**sizes, "SPLITS": splits, "num_stages": 1, **pdl}


def choose_tile_rows(num_rows: int, device: torch.device, numerics: Numerics) -> int:
    """Return the rows of a tile in a step of ``num_rows``; with batch-invariant numerics those whose MMA agrees."""
    if numerics.batch_invariant:
        return DECODE_ROWS if device.type == "cpu" or is_mma_bitwise_equal(device) else PREFILL_ROWS
    return DECODE_ROWS if num_rows < _MIN_PREFILL_ROWS else PREFILL_ROWS


def choose_splits(inputs: int, max_rank: int) -> int:
    """Return into how many parts a decode step divides the inputs: the more each of them stores, the fewer."""
    return max(1, min(inputs // _MIN_SPLIT_INPUTS, _MAX_SPLIT_RANKS // max(max_rank, 16)))
