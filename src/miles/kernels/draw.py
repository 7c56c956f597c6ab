"""One token a row from its logits: temperature, log-prob, filters, and the inverse CDF at a given uniform number.

Shapes: B rows, V vocabulary, C chunks of a row. All arithmetic is float32.

As device code a row is read once for the tops and sums of its chunks, and one of these chunks again for the token.
Filters add a search for the logit that parts what is kept from the rest (``cutoff``), and one more read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.cutoff import find_cutoffs
from miles.kernels.device_code import jit, ready, tl, triton

# Logits a program takes at once. The same for every batch: a row's token must not depend on the rows beside it.
CHUNK = 4096


def draw(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    *,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    filters: bool,
    tokens_out_B: Tensor,
    logprobs_out_B: Tensor,
) -> None:
    """Write tokens (int64) and their log-probs under the temperature (1 where it is 0: greedy) before any filter.

    A log-prob is not a number where a row's logits are not: any of them NaN or +inf, or all of them -inf. Filters are
    looked at only with ``filters``; a row has none where its top-k is 0, its top-p 1 and its min-p 0. They keep the k
    likeliest; of these the fewest that hold the fraction p; of these, none below min-p of the best.

    Device code and torch agree in all this up to rounding, but for what a filter leaves of tokens e^40 times less
    likely than the best: device code drops them.
    """
    if len(logits_BV) == 0:
        return
    limits = (top_k_B, top_p_B, min_p_B)
    if ready(logits_BV):
        launch(logits_BV, temperature_B, uniform_B, limits if filters else None, tokens_out_B, logprobs_out_B)
        return
    greedy_B1 = (temperature_B == 0)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature_B[:, None].masked_fill(greedy_B1, 1.0), -1)
    probs_BV = logprobs_BV.exp()
    kept_BV = filtered(probs_BV, *limits) if filters else probs_BV
    tokens_B1 = torch.where(greedy_B1, logprobs_BV.argmax(-1, keepdim=True), invert(kept_BV, uniform_B))
    tokens_out_B.copy_(tokens_B1.squeeze(1))
    logprobs_out_B.copy_(logprobs_BV.gather(1, tokens_B1).squeeze(1))


def invert(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulated probability exceeds the uniform number; never one of probability zero."""
    cdf_BV = probs_BV.cumsum(-1)
    target_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=probs_BV.shape[1] - 1)
    # Where the product, or a parallel sum, was rounded up to the total.
    impossible_B1 = probs_BV.gather(1, tokens_B1) <= 0
    return torch.where(impossible_B1, probs_BV.argmax(-1, keepdim=True), tokens_B1)


def filtered(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """What the filters leave of each row, in plain torch."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    keep_BV = (rank_V < top_k_B[:, None]) | (top_k_B[:, None] <= 0)
    sorted_BV = sorted_BV * keep_BV
    sum_BV = sorted_BV.cumsum(-1)
    keep_BV &= (sum_BV - sorted_BV < top_p_B[:, None] * sum_BV[:, -1:]) | (top_p_B[:, None] >= 1)
    keep_BV &= sorted_BV >= min_p_B[:, None] * sorted_BV[:, :1]
    keep_BV[:, 0] = True
    return torch.zeros_like(probs_BV).scatter_(1, order_BV, sorted_BV * keep_BV)


# -- device code ----------------------------------------------------------------------------


def launch(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    limits: tuple[Tensor, Tensor, Tensor] | None,
    tokens_out_B: Tensor,
    logprobs_out_B: Tensor,
    chunks: tuple[Tensor, Tensor] | None = None,
) -> None:
    """``draw`` as device code, with its filters or without.

    ``chunks`` are the tops and sums of the rows' chunks where they are known already.
    """
    per_row = (temperature_B, uniform_B, *(limits or ()), tokens_out_B, logprobs_out_B)
    assert logits_BV.stride(1) == 1 and all(each_B.is_contiguous() for each_B in per_row)
    rows, size = logits_BV.shape
    stride, count = logits_BV.stride(0), -(-size // CHUNK)
    shape = {"CHUNKS": triton.next_power_of_2(count), "CHUNK": CHUNK}
    if chunks is None:
        tops_BC, sums_BC = (torch.empty(rows, count, device=logits_BV.device) for _ in range(2))
        _sum_chunks[(rows, count)](logits_BV, temperature_B, tops_BC, sums_BC, stride, size, CHUNK=CHUNK, num_warps=4)
    else:
        tops_BC, sums_BC = chunks
    cutoff_B, spare_B, kept_BC, ties_BC = tops_BC, tops_BC, sums_BC, sums_BC
    if limits is not None:
        cutoff_B, spare_B = find_cutoffs(logits_BV, temperature_B, tops_BC, sums_BC, *limits)
        kept_BC, ties_BC = torch.empty_like(sums_BC), torch.empty_like(sums_BC, dtype=torch.int32)
        _sum_kept[(rows, count)](
            *(logits_BV, temperature_B, tops_BC, sums_BC, cutoff_B, kept_BC, ties_BC, stride, size, count),
            **shape,
            num_warps=4,
        )
    _pick[(rows,)](
        *(logits_BV, temperature_B, uniform_B, tops_BC, sums_BC, cutoff_B, spare_B, kept_BC, ties_BC),
        *(tokens_out_B, logprobs_out_B, stride, size, count),
        **shape,
        FILTERS=limits is not None,
        num_warps=8,
    )


@jit
def _sum_chunks(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """The top of each chunk, and the sum of its exponentials under that top."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    x_V = _read(logits_ptr, temperature_ptr, row, chunk, stride, size, CHUNK)
    top = tl.max(x_V, 0)
    total = tl.sum(tl.exp(x_V - tl.where(top == float("-inf"), 0.0, top)), 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(tops_ptr + place, top)
    tl.store(sums_ptr + place, total)


@jit
def _sum_kept(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    cutoff_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    ties_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The sum of what lies above the cutoff in each chunk, under the row's top, and how often the cutoff is met."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    place = row * chunks + chunk
    index_C = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(tops_ptr + row * chunks + index_C, index_C < chunks, other=float("-inf")), 0)
    cutoff = tl.load(cutoff_ptr + row)
    if cutoff == float("-inf"):
        tl.store(kept_ptr + place, tl.load(sums_ptr + place) * tl.exp(tl.load(tops_ptr + place) - top))
        tl.store(ties_ptr + place, 0)
    else:
        x_V = _read(logits_ptr, temperature_ptr, row, chunk, stride, size, CHUNK)
        tl.store(kept_ptr + place, tl.sum(tl.where(x_V > cutoff, tl.exp(x_V - top), 0.0), 0))
        tl.store(ties_ptr + place, tl.sum((x_V == cutoff).to(tl.int32), 0))


@jit
def _pick(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    cutoff_ptr: tl.tensor,
    spare_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    ties_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """The chunk that holds the target, then the token in it."""
    row = tl.program_id(0)
    index_C = tl.arange(0, CHUNKS)
    real_C = index_C < chunks
    tops_C = tl.load(tops_ptr + row * chunks + index_C, real_C, other=float("-inf"))
    top = tl.max(tops_C, 0)
    mass_C = tl.load(sums_ptr + row * chunks + index_C, real_C, other=0.0) * tl.exp(tops_C - top)
    total = tl.sum(mass_C, 0)
    if FILTERS:
        cutoff, spare = tl.load(cutoff_ptr + row), tl.load(spare_ptr + row)
        ties_C = tl.load(ties_ptr + row * chunks + index_C, real_C, other=0)
        earlier_C = tl.cumsum(ties_C, 0) - ties_C
        spared_C = tl.minimum(tl.maximum(spare - earlier_C, 0), ties_C)
        kept_C = tl.load(kept_ptr + row * chunks + index_C, real_C, other=0.0)
        mass_C = kept_C + tl.where(spared_C > 0, spared_C * tl.exp(cutoff - top), 0.0)
    greedy = tl.load(temperature_ptr + row) == 0.0
    sum_C = tl.cumsum(mass_C, 0)
    target = tl.load(uniform_ptr + row) * tl.max(sum_C, 0)
    best = tl.min(tl.where(tops_C == top, index_C, chunks - 1), 0)
    chunk = tl.where(greedy, best, _first(sum_C, mass_C, index_C, target, CHUNKS))
    x_V = _read(logits_ptr, temperature_ptr, row, chunk, stride, size, CHUNK)
    index_V = tl.arange(0, CHUNK)
    mass_V = tl.exp(x_V - top)
    if FILTERS:
        tie_V = (x_V == cutoff).to(tl.int32)
        rank_V = tl.sum(tl.where(index_C == chunk, earlier_C, 0), 0) + tl.cumsum(tie_V, 0)
        mass_V = tl.where((x_V > cutoff) | ((tie_V > 0) & (rank_V <= spare)), mass_V, 0.0)
    before = tl.max(tl.where(index_C < chunk, sum_C, 0.0), 0)
    drawn = _first(before + tl.cumsum(mass_V, 0), mass_V, index_V, target, CHUNK)
    best = tl.min(tl.where(x_V == top, index_V, CHUNK - 1), 0)
    place = tl.where(greedy, best, drawn)
    x = tl.sum(tl.where(index_V == place, x_V, 0.0), 0)
    tl.store(tokens_ptr + row, tl.minimum(chunk * CHUNK + place, size - 1).to(tl.int64))
    tl.store(logprobs_ptr + row, x - top - tl.log(total))


@jit
def _read(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    row: tl.tensor,
    chunk: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """A chunk's logits under the row's temperature; nothing beyond the last."""
    heat = tl.load(temperature_ptr + row)
    factor = tl.where(heat == 0.0, 1.0, 1.0 / heat)
    place_V = chunk * CHUNK + tl.arange(0, CHUNK)
    x_V = tl.load(logits_ptr + row.to(tl.int64) * stride + place_V, place_V < size, other=float("-inf"))
    return x_V.to(tl.float32) * factor


@jit
def _first(sum_N: tl.tensor, mass_N: tl.tensor, index_N: tl.tensor, target: tl.tensor, NONE: tl.constexpr) -> tl.tensor:
    """The first place with any mass whose sum exceeds the target; if rounding left none, the last with any mass."""
    first = tl.min(tl.where((sum_N > target) & (mass_N > 0.0), index_N, NONE), 0)
    return tl.where(first < NONE, first, tl.maximum(tl.max(tl.where(mass_N > 0.0, index_N, -1), 0), 0))
