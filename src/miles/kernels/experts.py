"""A mixture of experts' two products: device code of ours in engines, torch's grouped products everywhere else.

Shapes: T tokens, k experts a token, R = T * k rows, E experts, D features, I intermediate, F = 2I (I without gates);
M rows of a block, P blocks of rows, N columns and K depth of a tile.

As device code, rows are put into blocks of one expert's rows each, so that all sizes are known beforehand: a row is a
token's choice, and an unfilled place of a block holds row R, which is none. Both products round where torch does, and
a token's rows are added in the order of its choices, so results do not depend on the order in which programs run.
"""

from __future__ import annotations

from functools import cache
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.arithmetic import exact
from miles.kernels.device_code import early, gdc_launch_dependents, gdc_wait, jit, ready, tl, triton
from miles.kernels.exact.experts import Experts, exact_experts
from miles.kernels.gated import Kind, activate, combine
from miles.kernels.grouped import Exchange, Rows, collect, dispatch, fast, grouped_linear, order_rows, weigh
from miles.kernels.slim_experts import alone, experts_of_one
from miles.kernels.train_gated import gate


class Tile(NamedTuple):
    """What a program of a product takes at once, and how many warps and loads in flight it has."""

    columns: int
    depth: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """Blocks of ``rows``, and the tiles of the two products, for up to ``most`` rows an expert on average."""

    most: float
    rows: int
    first: Tile
    second: Tile


PLANS = (
    Plan(0.5, 16, Tile(32, 128, 4, 4), Tile(32, 128, 4, 4)),
    Plan(9.0, 16, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    Plan(20.0, 32, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    Plan(64.0, 64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
)


# For cards whose programs have this much memory for tiles: deeper ones, which keep more loads under way.
_ROOMY = 160 * 1024
ROOMY_PLANS = (
    PLANS[0],
    Plan(6.0, 16, Tile(128, 128, 8, 3), Tile(128, 128, 4, 3)),
    Plan(9.0, 16, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    Plan(26.0, 32, Tile(128, 128, 8, 3), Tile(128, 128, 4, 3)),
    Plan(72.0, 64, Tile(128, 64, 8, 5), Tile(128, 64, 4, 4)),
    Plan(inf, 128, Tile(128, 64, 8, 4), Tile(128, 64, 8, 3)),
)


@cache
def plans_on(device: torch.device) -> tuple[Plan, ...]:
    """The plans for a card, and numbers of two bytes."""
    if device.type != "cuda" or torch.version.hip is not None:
        return PLANS
    roomy = torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _ROOMY
    return ROOMY_PLANS if roomy else PLANS


def moe_forward(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    first_EFD: Tensor,
    down_EDI: Tensor,
    *,
    activation: Kind,
    interleaved: bool = False,
    first_bias_EF: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    weigh_input: bool = False,
    exchange: Exchange | None = None,
) -> Tensor:
    """The sum of each token's experts, weighted; ``weigh_input`` weights what goes into them instead.

    ``first_EFD`` holds gates and then ups (``interleaved``, in turns), or ups alone if it has no more rows than
    ``down_EDI`` has columns. With an ``exchange`` the stacked tensors are those of this rank's experts alone, while
    ``experts_Tk`` counts all ranks'.
    """
    if exact():
        how = Experts(first_EFD, down_EDI, first_bias_EF, down_bias_ED, activation, interleaved)
        return exact_experts(x_TD, weights_Tk, experts_Tk, how, weigh_input=weigh_input, exchange=exchange)
    biased = first_bias_EF is not None or down_bias_ED is not None
    if exchange is None and not (biased or interleaved or weigh_input) and alone(x_TD, experts_Tk, first_EFD, down_EDI):
        return experts_of_one(x_TD, weights_Tk, experts_Tk, first_EFD, down_EDI, activation)
    per_expert = experts_Tk.numel() / len(first_EFD)
    plans = plans_on(x_TD.device) if x_TD.itemsize == 2 else PLANS
    few = per_expert <= plans[-1].most or not (fast(x_TD, first_EFD) and fast(x_TD, down_EDI))
    if exchange is None and ready(x_TD) and few:  # ours, which never waits
        plan = next((plan for plan in plans if per_expert <= plan.most), plans[-1])
        how = (first_EFD, down_EDI, (first_bias_EF, down_bias_ED), activation, interleaved, plan)
        if not weigh_input:
            return _launch(x_TD, weights_Tk, experts_Tk, *how)
        x_RD = (x_TD.unsqueeze(1) * weights_Tk.unsqueeze(2)).flatten(0, 1)  # every choice a token of its own
        out_RD = _launch(x_RD, torch.ones_like(x_RD[:, :1]), experts_Tk.reshape(-1, 1), *how)
        return out_RD.unflatten(0, experts_Tk.shape).sum(1)
    rows = order_rows(experts_Tk, len(first_EFD) * (1 if exchange is None else exchange.world))
    # Told before the copies are made, so that the device has these to do while the host waits for the answer.
    trip = None if exchange is None else exchange.open(rows)
    x_RD = dispatch(x_TD, rows)
    if weigh_input:
        x_RD = weigh(x_RD, weights_Tk, rows)

    def work(x_RD: Tensor, rows: Rows) -> Tensor:
        inner_RF = grouped_linear(x_RD, first_EFD, rows, first_bias_EF)
        if inner_RF.shape[1] == down_EDI.shape[2]:
            inner_RI = activate(inner_RF, None, activation)
        else:
            inner_RI = gate(inner_RF, activation, interleaved=interleaved)
        return grouped_linear(inner_RI, down_EDI, rows, down_bias_ED)

    out_RD = work(x_RD, rows) if trip is None else trip(x_RD, work)
    return collect(out_RD, None if weigh_input else weights_Tk, rows)


# -- device code ----------------------------------------------------------------------------


def _launch(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    first_EFD: Tensor,
    down_EDI: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: Kind,
    interleaved: bool,
    plan: Plan,
) -> Tensor:
    (tokens, per_token), (experts, width, size) = experts_Tk.shape, down_EDI.shape
    rows = tokens * per_token
    out_TD = torch.empty(tokens, width, dtype=x_TD.dtype, device=x_TD.device)
    if tokens == 0:
        return out_TD
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    assert first_EFD.is_contiguous() and down_EDI.is_contiguous()
    blocks = min(rows, rows // plan.rows + experts)
    rows_PM = torch.empty(blocks, plan.rows, dtype=torch.int32, device=x_TD.device)
    owner_P = torch.empty(blocks, dtype=torch.int32, device=x_TD.device)
    started = early(x_TD.device)
    _place_rows[(experts,)](
        *(experts_Tk.contiguous(), rows_PM, owner_P, rows, blocks),
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_R=min(triton.next_power_of_2(rows), 8192),
        M=plan.rows,
        num_warps=8 if rows <= 2048 else 16,
        **started,
    )
    inner_I = torch.empty(blocks * plan.rows, size, dtype=x_TD.dtype, device=x_TD.device)
    out_RD = torch.empty(rows, width, dtype=x_TD.dtype, device=x_TD.device)
    taller = first_EFD.shape[1] == 2 * size
    how = {"PER_TOKEN": per_token, "KIND": activation, "INTERLEAVED": interleaved, "M": plan.rows}
    for x, weight, bias, out, tile in (
        (x_TD, first_EFD, biases[0], inner_I, plan.first),
        (inner_I, down_EDI, biases[1], out_RD, plan.second),
    ):
        # Sixteen is the least a product of tiles takes; wider numbers take more room.
        columns, depth = out.shape[1], max(16, min(tile.depth, 1 << (x.shape[1] - 1).bit_length()))
        depth = depth if x.dtype.itemsize < 4 else min(depth, 32)
        _multiply[(triton.cdiv(columns, tile.columns), blocks)](
            *(x, weight, bias, out, rows_PM, owner_P, x.stride(0), columns, x.shape[1], rows),
            **how,
            FIRST=x is x_TD,
            GATED=x is x_TD and taller,
            BIAS=bias is not None,
            EVEN=x.shape[1] % depth == 0,
            N=tile.columns,
            K=depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **started,
        )
    block = min(triton.next_power_of_2(width), 1024)
    _add_choices[(tokens, triton.cdiv(width, block))](
        *(out_RD, weights_Tk.contiguous(), out_TD, width), PER_TOKEN=per_token, BLOCK=block, num_warps=4, **started
    )
    return out_TD


@jit
def _in_turn(EARLY: tl.constexpr) -> None:
    """Let the next launch begin, and wait until the one before it is over."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@jit
def _place_rows(
    experts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    owner_ptr: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    M: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One expert's rows into its blocks, in order. Every program counts all rows, to know where its own begin."""
    _in_turn(EARLY)
    expert = tl.program_id(0)
    expert_E = tl.arange(0, BLOCK_E)
    count_E = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, rows, BLOCK_R):
        row_R = start + tl.arange(0, BLOCK_R)
        chosen_R = tl.load(experts_ptr + row_R, row_R < rows, other=0).to(tl.int32)
        count_E += tl.histogram(chosen_R, BLOCK_E, row_R < rows)
    block_E = (count_E + M - 1) // M
    first = tl.sum(tl.where(expert_E < expert, block_E, 0), 0)
    own = tl.sum(tl.where(expert_E == expert, block_E, 0), 0)
    placed = first * M
    for start in range(0, rows, BLOCK_R):
        row_R = start + tl.arange(0, BLOCK_R)
        chosen_R = tl.load(experts_ptr + row_R, row_R < rows, other=-1).to(tl.int32)
        mine_R = (chosen_R == expert).to(tl.int32)
        tl.store(rows_ptr + placed + tl.cumsum(mine_R, 0) - 1, row_R, mine_R > 0)
        placed += tl.sum(mine_R, 0)
    spare_M = placed + tl.arange(0, M)
    tl.store(rows_ptr + spare_M, rows, spare_M < (first + own) * M)
    for block in range(first, first + own):
        tl.store(owner_ptr + block, expert)
    if expert == 0:
        for block in range(tl.sum(block_E, 0), blocks):
            tl.store(owner_ptr + block, -1)


@jit
def _multiply(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    owner_ptr: tl.tensor,
    x_stride: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    rows: tl.tensor,
    PER_TOKEN: tl.constexpr,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """A block's rows times its expert's weight. The first product takes tokens and activates; the second, its result.

    What lies outside is computed with what lies inside, and not written.
    """
    _in_turn(EARLY)
    block = tl.program_id(1)
    expert = tl.load(owner_ptr + block).to(tl.int64)
    if expert < 0:
        return
    place_M = block * M + tl.arange(0, M)
    row_M = tl.load(rows_ptr + place_M)
    column_N = tl.program_id(0) * N + tl.arange(0, N)
    safe_N = column_N % columns
    height = 2 * columns if GATED else columns
    gate_N = 2 * safe_N if GATED and INTERLEAVED else safe_N
    up_N = gate_N + 1 if INTERLEAVED else columns + safe_N
    source_M = place_M
    if FIRST:
        source_M = tl.where(row_M < rows, row_M // PER_TOKEN, 0)
    depth_K = tl.arange(0, K)
    x_MK = x_ptr + source_M.to(tl.int64)[:, None] * x_stride + depth_K[None, :]
    weight_ptr += expert * height * depth
    gate_NK = weight_ptr + gate_N[:, None] * depth + depth_K[None, :]
    up_NK = weight_ptr + up_N[:, None] * depth + depth_K[None, :]
    gate_MN, up_MN = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
    for start in range(0, depth, K):
        x, gate = _read(x_MK, start, depth, EVEN, K), _read(gate_NK, start, depth, EVEN, K)
        gate_MN = tl.dot(x, tl.trans(gate), gate_MN, input_precision="ieee")
        if GATED:
            up_MN = tl.dot(x, tl.trans(_read(up_NK, start, depth, EVEN, K)), up_MN, input_precision="ieee")
    out_MN = _rounded(gate_MN, bias_ptr, expert * height + gate_N, x_ptr.dtype.element_ty, BIAS)
    if FIRST:
        if GATED:
            up_MN = _rounded(up_MN, bias_ptr, expert * height + up_N, x_ptr.dtype.element_ty, BIAS)
        out_MN = combine(out_MN, up_MN, KIND, GATED)
    out_M1 = out_ptr + (place_M if FIRST else row_M).to(tl.int64)[:, None] * columns
    tl.store(out_M1 + column_N[None, :], out_MN, (row_M < rows)[:, None] & (column_N < columns)[None, :])


@jit
def _read(tile_ptr: tl.tensor, start: tl.tensor, depth: tl.tensor, EVEN: tl.constexpr, K: tl.constexpr) -> tl.tensor:
    if EVEN:
        return tl.load(tile_ptr + start)
    return tl.load(tile_ptr + start, (start + tl.arange(0, K) < depth)[None, :], other=0.0)


@jit
def _rounded(
    sum_MN: tl.tensor, bias_ptr: tl.tensor, place_N: tl.tensor, DTYPE: tl.dtype, BIAS: tl.constexpr
) -> tl.tensor:
    """A product in the model's dtype, with its bias added as a step of its own."""
    out_MN = sum_MN.to(DTYPE)
    if BIAS:
        out_MN = (out_MN.to(tl.float32) + tl.load(bias_ptr + place_N).to(tl.float32)[None, :]).to(DTYPE)
    return out_MN


@jit
def _add_choices(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """The weighted sum of a token's rows."""
    _in_turn(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_D = column_D < width
    sum_D = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + choice
        row_D = tl.load(rows_ptr + row * width + column_D, inside_D, other=0.0).to(tl.float32)
        sum_D += tl.load(weights_ptr + row).to(tl.float32) * row_D
    tl.store(out_ptr + token * width + column_D, sum_D, inside_D)
