"""Fused MoE: two grouped GEMMs with the activation between, in Triton for inference and torch's grouped GEMM otherwise.

Shapes: T tokens, k experts per token, R = T * k rows, E experts, D features, I intermediate, F = 2I (I without gates);
M rows of a block, P blocks of rows, N columns and K depth of a tile.

The Triton kernels put rows into blocks of one expert's rows each, so that all sizes are known without a device sync: a
row is a token's choice, and an unused entry of a block holds row R, which does not exist. Both GEMMs round where torch
does, and a token's rows are added in the order of its choices, so results do not depend on the order in which programs
run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.batch_invariant.fused_moe import ExpertWeights, batch_invariant_moe
from miles.kernels.fused.activation import ActivationKind, activate_and_multiply, apply_activation, gated_activation
from miles.kernels.lora.experts import ExpertLora, add_expert_rows, choose_expert_tile_rows, plan_expert_tiles
from miles.kernels.moe.grouped_gemm import (
    ExpertExchange,
    RowAdapter,
    SortedRows,
    combine_rows,
    dispatch,
    grouped_linear,
    scale_rows,
    sort_rows_by_group,
    supports_grouped_mm,
)
from miles.kernels.moe.moe_gemv import can_use_moe_gemv, moe_gemv
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
    use_triton_inference,
)


class MoeTile(NamedTuple):
    """Columns and depth of a GEMM tile, warps and pipeline stages."""

    columns: int
    depth: int
    warps: int
    stages: int


class MoeTileConfig(NamedTuple):
    """Rows of a block, and the tiles of the two GEMMs, for up to ``max_rows_per_expert`` rows per expert on average."""

    max_rows_per_expert: float
    rows: int
    first: MoeTile
    second: MoeTile


TILE_CONFIGS = (
    MoeTileConfig(0.5, 16, MoeTile(32, 128, 4, 4), MoeTile(32, 128, 4, 4)),
    MoeTileConfig(9.0, 16, MoeTile(64, 64, 4, 4), MoeTile(128, 64, 4, 4)),
    MoeTileConfig(20.0, 32, MoeTile(64, 64, 4, 4), MoeTile(128, 64, 4, 4)),
    MoeTileConfig(64.0, 64, MoeTile(64, 64, 4, 3), MoeTile(128, 64, 4, 3)),
)


# For GPUs with this much shared memory per block: deeper tiles, which keep more loads in flight.
_LARGE_SMEM = 160 * 1024
LARGE_SMEM_TILE_CONFIGS = (
    TILE_CONFIGS[0],
    MoeTileConfig(6.0, 16, MoeTile(128, 128, 8, 3), MoeTile(128, 128, 4, 3)),
    MoeTileConfig(9.0, 16, MoeTile(64, 128, 4, 3), MoeTile(128, 128, 4, 3)),
    MoeTileConfig(26.0, 32, MoeTile(128, 128, 8, 3), MoeTile(128, 128, 4, 3)),
    MoeTileConfig(72.0, 64, MoeTile(128, 64, 8, 5), MoeTile(128, 64, 4, 4)),
    MoeTileConfig(inf, 128, MoeTile(128, 64, 8, 4), MoeTile(128, 64, 8, 3)),
)


@cache
def select_tile_configs(device: torch.device) -> tuple[MoeTileConfig, ...]:
    """The tile configurations of a GPU for half precision."""
    if device.type != "cuda" or torch.version.hip is not None:
        return TILE_CONFIGS
    has_large_smem = torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _LARGE_SMEM
    return LARGE_SMEM_TILE_CONFIGS if has_large_smem else TILE_CONFIGS


def moe_forward(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    first_EFD: Tensor,
    down_EDI: Tensor,
    *,
    activation: ActivationKind,
    numerics: Numerics,
    interleaved: bool = False,
    first_bias_EF: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    weigh_input: bool = False,
    exchange: ExpertExchange | None = None,
    adapters: tuple[RowAdapter | None, RowAdapter | None] = (None, None),
    lora: ExpertLora | None = None,
) -> Tensor:
    """The weighted sum of each token's experts; ``weigh_input`` applies the weights to the input instead.

    ``first_EFD`` holds gates and then ups (``interleaved``: alternating), or ups alone if it has as many rows as
    ``down_EDI`` has columns. With an ``exchange`` (expert parallelism) the weights are those of this rank's experts,
    while ``experts_Tk`` counts all ranks' experts. Adapters get the rows of the two GEMMs; ``lora`` is what they add,
    for inference.
    """
    if lora is not None and adapters == (None, None):
        adapters = lora.build_row_adapters(len(first_EFD), numerics)
    if numerics.batch_invariant:
        weights = ExpertWeights(first_EFD, down_EDI, first_bias_EF, down_bias_ED, activation, interleaved, *adapters)
        return batch_invariant_moe(x_TD, weights_Tk, experts_Tk, weights, weigh_input=weigh_input, exchange=exchange)
    biased = first_bias_EF is not None or down_bias_ED is not None
    has_adapters = adapters != (None, None)
    is_plain = exchange is None and not (biased or interleaved or weigh_input or has_adapters)
    if is_plain and can_use_moe_gemv(x_TD, experts_Tk, first_EFD, down_EDI):
        return moe_gemv(x_TD, weights_Tk, experts_Tk, first_EFD, down_EDI, activation)
    per_expert = experts_Tk.numel() / len(first_EFD)
    configs = select_tile_configs(x_TD.device) if x_TD.itemsize == 2 else TILE_CONFIGS
    use_triton_gemm = per_expert <= configs[-1].max_rows_per_expert or not (
        supports_grouped_mm(x_TD, first_EFD) and supports_grouped_mm(x_TD, down_EDI)
    )
    use_triton_gemm &= exchange is None and use_triton_inference(x_TD)
    if lora is not None and exchange is None and use_triton_inference(x_TD):
        config = next((config for config in configs if per_expert <= config.max_rows_per_expert), configs[-1])
        expert_args = (first_EFD, down_EDI, (first_bias_EF, down_bias_ED), activation, interleaved, config)
        return (_launch_weighed_lora if weigh_input else launch_with_lora)(
            x_TD, weights_Tk, experts_Tk, *expert_args, lora
        )
    if use_triton_gemm and not has_adapters:
        config = next((config for config in configs if per_expert <= config.max_rows_per_expert), configs[-1])
        expert_args = (first_EFD, down_EDI, (first_bias_EF, down_bias_ED), activation, interleaved, config)
        return (_launch_weighed if weigh_input else _launch)(x_TD, weights_Tk, experts_Tk, *expert_args)
    weights = ExpertWeights(first_EFD, down_EDI, first_bias_EF, down_bias_ED, activation, interleaved, *adapters)
    return _run_grouped(x_TD, weights_Tk, experts_Tk, weights, weigh_input=weigh_input, exchange=exchange)


def _run_grouped(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    experts: ExpertWeights,
    *,
    weigh_input: bool,
    exchange: ExpertExchange | None,
) -> Tensor:
    """``moe_forward`` by grouped GEMMs of torch, in training and where no Triton kernel applies."""
    rows = sort_rows_by_group(experts_Tk, len(experts.first_EFD) * (1 if exchange is None else exchange.world))
    # Started before the copies are made, so that the device is busy while the host waits for the sizes.
    handle = None if exchange is None else exchange.open(rows)
    x_RD = dispatch(x_TD, rows)
    if weigh_input:
        x_RD = scale_rows(x_RD, weights_Tk, rows)

    def run_experts(x_RD: Tensor, rows: SortedRows) -> Tensor:
        inner_RF = grouped_linear(x_RD, experts.first_EFD, rows, experts.first_bias_EF)
        if experts.first_adapter is not None:
            inner_RF = experts.first_adapter(inner_RF, x_RD, rows)
        if inner_RF.shape[1] == experts.down_EDI.shape[2]:
            inner_RI = apply_activation(inner_RF, None, experts.activation)
        else:
            inner_RI = gated_activation(inner_RF, experts.activation, interleaved=experts.interleaved)
        out_RD = grouped_linear(inner_RI, experts.down_EDI, rows, experts.down_bias_ED)
        return out_RD if experts.down_adapter is None else experts.down_adapter(out_RD, inner_RI, rows)

    out_RD = run_experts(x_RD, rows) if handle is None else handle(x_RD, run_experts)
    return combine_rows(out_RD, None if weigh_input else weights_Tk, rows)


# -- Triton ---------------------------------------------------------------------------------


def _launch_weighed(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    first_EFD: Tensor,
    down_EDI: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: ActivationKind,
    interleaved: bool,
    config: MoeTileConfig,
) -> Tensor:
    """As ``_launch``, with the weights applied to the inputs: every choice becomes a token of its own."""
    x_RD = (x_TD.unsqueeze(1) * weights_Tk.unsqueeze(2)).flatten(0, 1)
    expert_args = (first_EFD, down_EDI, biases, activation, interleaved, config)
    out_RD = _launch(x_RD, torch.ones_like(x_RD[:, :1]), experts_Tk.reshape(-1, 1), *expert_args)
    return out_RD.unflatten(0, experts_Tk.shape).sum(1)


def _launch(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    first_EFD: Tensor,
    down_EDI: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: ActivationKind,
    interleaved: bool,
    config: MoeTileConfig,
) -> Tensor:
    (tokens, per_token), (experts, width, size) = experts_Tk.shape, down_EDI.shape
    rows = tokens * per_token
    if tokens == 0:
        return torch.empty(tokens, width, dtype=x_TD.dtype, device=x_TD.device)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    assert first_EFD.is_contiguous() and down_EDI.is_contiguous()
    pdl = pdl_options(x_TD.device)
    rows_PM, expert_P = place_rows(experts_Tk, experts, config.rows)
    blocks = len(expert_P)
    inner_I = torch.empty(blocks * config.rows, size, dtype=x_TD.dtype, device=x_TD.device)
    out_RD = torch.empty(rows, width, dtype=x_TD.dtype, device=x_TD.device)
    is_gated = first_EFD.shape[1] == 2 * size
    expert_args = {"PER_TOKEN": per_token, "ACTIVATION": activation, "INTERLEAVED": interleaved, "M": config.rows}
    for x, weight, bias, out, tile in (
        (x_TD, first_EFD, biases[0], inner_I, config.first),
        (inner_I, down_EDI, biases[1], out_RD, config.second),
    ):
        # tl.dot needs at least 16; wider dtypes take more shared memory.
        columns, depth = out.shape[1], max(16, min(tile.depth, 1 << (x.shape[1] - 1).bit_length()))
        depth = depth if x.dtype.itemsize < 4 else min(depth, 32)
        tensors = (x, weight, bias, out, rows_PM, expert_P)
        scalars = (x.stride(0), columns, x.shape[1], rows)
        _expert_gemm_kernel[(triton.cdiv(columns, tile.columns), blocks)](
            *tensors,
            *scalars,
            **expert_args,
            FIRST=x is x_TD,
            GATED=x is x_TD and is_gated,
            BY_ROW=False,
            BIAS=bias is not None,
            EVEN=x.shape[1] % depth == 0,
            N=tile.columns,
            K=depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **pdl,
        )
    return combine_choices(out_RD, weights_Tk)


def launch_with_lora(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    first_EFD: Tensor,
    down_EDI: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: ActivationKind,
    interleaved: bool,
    config: MoeTileConfig,
    lora: ExpertLora,
) -> Tensor:
    """As ``_launch``, with LoRA adapters behind both GEMMs; the activation is a launch of its own between them."""
    (tokens, per_token), (experts, width, size) = experts_Tk.shape, down_EDI.shape
    if tokens == 0:
        return torch.empty(tokens, width, dtype=x_TD.dtype, device=x_TD.device)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    placed = place_rows(experts_Tk, experts, config.rows)
    num_rows = tokens * per_token
    tile_rows = choose_expert_tile_rows(num_rows, experts)
    plan = plan_expert_tiles(
        experts_Tk, lora.slots_T, num_experts=experts, num_slots=lora.num_slots, tile_rows=tile_rows
    )
    inner_RF = torch.empty(num_rows, first_EFD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    _launch_by_row(x_TD, first_EFD, biases[0], inner_RF, placed, per_token, config.rows, config.first)
    if lora.first is not None:
        add_expert_rows(inner_RF, x_TD, lora.first, plan, num_experts=experts, per_token=per_token)
    if inner_RF.shape[1] == size:
        inner_RI = apply_activation(inner_RF, None, activation)
    else:
        inner_RI = gated_activation(inner_RF, activation, interleaved=interleaved)
    out_RD = torch.empty(num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
    _launch_by_row(inner_RI, down_EDI, biases[1], out_RD, placed, 1, config.rows, config.second)
    if lora.down is not None:
        add_expert_rows(out_RD, inner_RI, lora.down, plan, num_experts=experts, per_token=1)
    return combine_choices(out_RD, weights_Tk)


def _launch_weighed_lora(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    first_EFD: Tensor,
    down_EDI: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: ActivationKind,
    interleaved: bool,
    config: MoeTileConfig,
    lora: ExpertLora,
) -> Tensor:
    """As ``launch_with_lora``, with the weights applied to the inputs: every choice becomes a token of its own."""
    x_RD = (x_TD.unsqueeze(1) * weights_Tk.unsqueeze(2)).flatten(0, 1)
    slots_R = None if lora.slots_T is None else lora.slots_T.repeat_interleave(experts_Tk.shape[1])
    expert_args = (first_EFD, down_EDI, biases, activation, interleaved, config, replace(lora, slots_T=slots_R))
    out_RD = launch_with_lora(x_RD, torch.ones_like(x_RD[:, :1]), experts_Tk.reshape(-1, 1), *expert_args)
    return out_RD.unflatten(0, experts_Tk.shape).sum(1)


def _launch_by_row(
    x: Tensor,
    weight_ENK: Tensor,
    bias_EN: Tensor | None,
    out_RN: Tensor,
    placed: tuple[Tensor, Tensor],
    per_token: int,
    block_rows: int,
    tile: MoeTile,
) -> None:
    """Multiply each row by its expert's weight into its own row of ``out``; row r is that of ``x[r // per_token]``."""
    assert weight_ENK.is_contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    depth = max(16, min(tile.depth, 1 << (x.shape[1] - 1).bit_length()))
    depth = depth if x.dtype.itemsize < 4 else min(depth, 32)
    rows_PM, expert_P = placed
    _expert_gemm_kernel[(triton.cdiv(out_RN.shape[1], tile.columns), len(expert_P))](
        x,
        weight_ENK,
        bias_EN,
        out_RN,
        rows_PM,
        expert_P,
        x.stride(0),
        out_RN.shape[1],
        x.shape[1],
        len(out_RN),
        PER_TOKEN=per_token,
        ACTIVATION="silu",
        INTERLEAVED=False,
        M=block_rows,
        FIRST=False,
        GATED=False,
        BY_ROW=True,
        BIAS=bias_EN is not None,
        EVEN=x.shape[1] % depth == 0,
        N=tile.columns,
        K=depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(x.device),
    )


def combine_choices(out_RD: Tensor, weights_Tk: Tensor) -> Tensor:
    """The weighted sum of each token's rows, in the order of its choices."""
    (tokens, per_token), width = weights_Tk.shape, out_RD.shape[1]
    out_TD = torch.empty(tokens, width, dtype=out_RD.dtype, device=out_RD.device)
    block = min(triton.next_power_of_2(width), 1024)
    _combine_kernel[(tokens, triton.cdiv(width, block))](
        out_RD,
        weights_Tk.contiguous(),
        out_TD,
        width,
        PER_TOKEN=per_token,
        BLOCK=block,
        num_warps=4,
        **pdl_options(out_RD.device),
    )
    return out_TD


def place_rows(experts_Tk: Tensor, experts: int, block_rows: int) -> tuple[Tensor, Tensor]:
    """Sort rows by expert into blocks: the rows of each block and its expert."""
    rows = experts_Tk.numel()
    blocks = min(rows, rows // block_rows + experts)
    rows_PM = torch.empty(blocks, block_rows, dtype=torch.int32, device=experts_Tk.device)
    expert_P = torch.empty(blocks, dtype=torch.int32, device=experts_Tk.device)
    _place_rows_kernel[(experts,)](
        experts_Tk.contiguous(),
        rows_PM,
        expert_P,
        rows,
        blocks,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_R=min(triton.next_power_of_2(rows), 8192),
        M=block_rows,
        num_warps=8 if rows <= 2048 else 16,
        **pdl_options(experts_Tk.device),
    )
    return rows_PM, expert_P


@jit
def _wait_in_turn(PDL: tl.constexpr) -> None:
    """Let the next launch start, and wait for the previous one (PDL)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@jit
def _place_rows_kernel(
    experts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    M: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Put one expert's rows into its blocks, in order. Every program counts all rows to find where its own begin."""
    _wait_in_turn(PDL)
    expert = tl.program_id(0)
    expert_E = tl.arange(0, BLOCK_E)
    count_E = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, rows, BLOCK_R):
        row_R = start + tl.arange(0, BLOCK_R)
        expert_R = tl.load(experts_ptr + row_R, row_R < rows, other=0).to(tl.int32)
        count_E += tl.histogram(expert_R, BLOCK_E, row_R < rows)
    block_E = (count_E + M - 1) // M
    first = tl.sum(tl.where(expert_E < expert, block_E, 0), 0)
    num_own_blocks = tl.sum(tl.where(expert_E == expert, block_E, 0), 0)
    next_index = first * M
    for start in range(0, rows, BLOCK_R):
        row_R = start + tl.arange(0, BLOCK_R)
        expert_R = tl.load(experts_ptr + row_R, row_R < rows, other=-1).to(tl.int32)
        is_mine_R = (expert_R == expert).to(tl.int32)
        tl.store(rows_ptr + next_index + tl.cumsum(is_mine_R, 0) - 1, row_R, is_mine_R > 0)
        next_index += tl.sum(is_mine_R, 0)
    unused_M = next_index + tl.arange(0, M)
    tl.store(rows_ptr + unused_M, rows, unused_M < (first + num_own_blocks) * M)
    for block in range(first, first + num_own_blocks):
        tl.store(block_expert_ptr + block, expert)
    if expert == 0:
        for block in range(tl.sum(block_E, 0), blocks):
            tl.store(block_expert_ptr + block, -1)


@jit
def _expert_gemm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    x_stride: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    rows: tl.tensor,
    PER_TOKEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    BY_ROW: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A block's rows times its expert's weight. The first GEMM reads tokens and applies the activation.

    With ``BY_ROW`` neither GEMM does more than multiply: inputs and outputs are those of the rows, or of their tokens.
    Out-of-range rows and columns are computed with valid data and not stored.
    """
    _wait_in_turn(PDL)
    block = tl.program_id(1)
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert < 0:
        return
    index_M = block * M + tl.arange(0, M)
    row_M = tl.load(rows_ptr + index_M)
    column_N = tl.program_id(0) * N + tl.arange(0, N)
    valid_column_N = column_N % columns
    weight_rows = 2 * columns if GATED else columns
    gate_N = 2 * valid_column_N if GATED and INTERLEAVED else valid_column_N
    up_N = gate_N + 1 if INTERLEAVED else columns + valid_column_N
    source_M = index_M
    if FIRST or BY_ROW:
        source_M = tl.where(row_M < rows, row_M // PER_TOKEN, 0)
    depth_K = tl.arange(0, K)
    x_MK = x_ptr + source_M.to(tl.int64)[:, None] * x_stride + depth_K[None, :]
    weight_ptr += expert * weight_rows * depth
    gate_NK = weight_ptr + gate_N[:, None] * depth + depth_K[None, :]
    up_NK = weight_ptr + up_N[:, None] * depth + depth_K[None, :]
    gate_MN, up_MN = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
    for start in range(0, depth, K):
        x, gate = load_tile(x_MK, start, depth, EVEN, K), load_tile(gate_NK, start, depth, EVEN, K)
        gate_MN = tl.dot(x, tl.trans(gate), gate_MN, input_precision="ieee")
        if GATED:
            up_MN = tl.dot(x, tl.trans(load_tile(up_NK, start, depth, EVEN, K)), up_MN, input_precision="ieee")
    out_MN = _round_with_bias(gate_MN, bias_ptr, expert * weight_rows + gate_N, x_ptr.dtype.element_ty, BIAS)
    if FIRST:
        if GATED:
            up_MN = _round_with_bias(up_MN, bias_ptr, expert * weight_rows + up_N, x_ptr.dtype.element_ty, BIAS)
        out_MN = activate_and_multiply(out_MN, up_MN, ACTIVATION, GATED)
    out_M1 = out_ptr + (index_M if FIRST else row_M).to(tl.int64)[:, None] * columns
    tl.store(out_M1 + column_N[None, :], out_MN, (row_M < rows)[:, None] & (column_N < columns)[None, :])


@jit
def load_tile(
    tile_ptr: tl.tensor, start: tl.tensor, depth: tl.tensor, EVEN: tl.constexpr, K: tl.constexpr
) -> tl.tensor:
    if EVEN:
        return tl.load(tile_ptr + start)
    return tl.load(tile_ptr + start, (start + tl.arange(0, K) < depth)[None, :], other=0.0)


@jit
def _round_with_bias(
    sum_MN: tl.tensor, bias_ptr: tl.tensor, place_N: tl.tensor, DTYPE: tl.dtype, BIAS: tl.constexpr
) -> tl.tensor:
    """A GEMM result in the model's dtype, with the bias added as a separate step."""
    out_MN = sum_MN.to(DTYPE)
    if BIAS:
        out_MN = (out_MN.to(tl.float32) + tl.load(bias_ptr + place_N).to(tl.float32)[None, :]).to(DTYPE)
    return out_MN


@jit
def _combine_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The weighted sum of a token's rows."""
    _wait_in_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid_D = column_D < width
    sum_D = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + choice
        row_D = tl.load(rows_ptr + row * width + column_D, valid_D, other=0.0).to(tl.float32)
        sum_D += tl.load(weights_ptr + row).to(tl.float32) * row_D
    tl.store(out_ptr + token * width + column_D, sum_D, valid_D)
