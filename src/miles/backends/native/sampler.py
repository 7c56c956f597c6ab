"""Draw one token a row: its seed and position give one uniform number, the inverse CDF gives the token.

Shapes: D rows that draw, V vocabulary, F those of them with a filter, N rows; of edits and looks as in ``order``. All
arithmetic is float32. Nothing here waits for a device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.native.order import Edits, Floats, Looks, Manner
from miles.backends.native.sending import Sender
from miles.kernels.arithmetic import exact
from miles.kernels.exact.elements import each
from miles.kernels.exact.head import logp_of, logsumexp

Words = NDArray[np.uint64]

_GOLDEN, _FIRST, _SECOND = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_30, _27, _31, _LOW = np.array([30, 27, 31, 40], np.uint64)
_UNIT = np.float32(2**-24)


def streams(seed_D: Words) -> Words:
    """Where the random numbers of each seed begin."""
    return _mix(seed_D + _GOLDEN)


def uniforms(stream_D: Words, index_D: Words) -> Floats:
    """The number in [0, 1) at each place of each stream: a 64-bit mixer over both, the top 24 bits."""
    return (_mix(stream_D + index_D * _GOLDEN) >> _LOW).astype(np.float32) * _UNIT


def _mix(z: Words) -> Words:
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


def draw(logits_DV: Tensor, manner: Manner, send: Sender) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their log-probs, and all log-probs under the temperature (1 where it is 0: greedy) before any filter."""
    logits_DV = logits_DV.float()
    greedy_D = manner.temperature_D == 0
    heat_D = np.where(greedy_D, np.float32(1), manner.temperature_D)
    heat_there_D, uniform_D = send(heat_D, manner.uniform_D)
    lse_D: Tensor | None = None
    if exact():
        logprobs_DV, lse_D = exact_logprobs(logits_DV, heat_there_D)
    else:
        if (heat_D != 1).any():
            logits_DV = logits_DV / heat_there_D[:, None]
        logprobs_DV = torch.log_softmax(logits_DV, -1)
    if greedy_D.all():
        tokens_D = logits_DV.argmax(-1)
    else:
        probs_DV = each(torch.exp, logprobs_DV) if exact() else logprobs_DV.exp()
        if manner.filters_D.any():
            _filter(probs_DV, manner, send)
        tokens_D = invert(probs_DV, uniform_D)
        if greedy_D.any():
            tokens_D = torch.where(send(greedy_D)[0], logits_DV.argmax(-1), tokens_D)
    if lse_D is not None:
        return tokens_D, logp_of(logits_DV, tokens_D, heat_there_D, lse_D), logprobs_DV
    return tokens_D, logprobs_DV.gather(1, tokens_D[:, None]).squeeze(1), logprobs_DV


def exact_logprobs(logits_NV: Tensor, heat_N: Tensor) -> tuple[Tensor, Tensor]:
    """All log-probs under temperatures above 0, up to their last bit, and the log-sums that single ones follow from."""
    lse_N = logsumexp(logits_NV, heat_N)
    sharp_N = torch.ones_like(heat_N) / heat_N
    return logits_NV * sharp_N[:, None] - lse_N[:, None], lse_N


def invert(probs_DV: Tensor, uniform_D: Tensor) -> Tensor:
    """The first token whose cumulated probability exceeds the uniform number; never one of probability zero."""
    cdf_DV = probs_DV.cumsum(-1)
    target_D1 = uniform_D[:, None] * cdf_DV[:, -1:]
    tokens_D1 = torch.searchsorted(cdf_DV, target_D1, right=True).clamp_(max=probs_DV.shape[1] - 1)
    # Where the product, or a parallel sum, was rounded up to the total. Asking a device whether it was means waiting.
    impossible_D1 = probs_DV.gather(1, tokens_D1) <= 0
    if impossible_D1.is_cuda or impossible_D1.any():
        tokens_D1 = torch.where(impossible_D1, probs_DV.argmax(-1, keepdim=True), tokens_D1)
    return tokens_D1.squeeze(1)


def _filter(probs_DV: Tensor, manner: Manner, send: Sender) -> None:
    """Zero what top-k, then top-p, then min-p cut away, in the rows that ask for it."""
    rows = np.flatnonzero(manner.filters_D)
    rows_F, top_k_F = send(rows, manner.top_k_D[rows])
    top_p_F, min_p_F = send(manner.top_p_D[rows], manner.min_p_D[rows])
    kept_FV = filtered(probs_DV.index_select(0, rows_F), top_k_F, top_p_F, min_p_F)
    probs_DV.index_copy_(0, rows_F, kept_FV)


def filtered(probs_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor, min_p_F: Tensor) -> Tensor:
    """The k likeliest tokens; of these the fewest that hold the fraction p; of these, none below min-p of the best."""
    sorted_FV, order_FV = probs_FV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_FV.shape[1], device=probs_FV.device)
    keep_FV = (rank_V < top_k_F[:, None]) | (top_k_F[:, None] <= 0)
    sorted_FV = sorted_FV * keep_FV
    sum_FV = sorted_FV.cumsum(-1)
    keep_FV &= (sum_FV - sorted_FV < top_p_F[:, None] * sum_FV[:, -1:]) | (top_p_F[:, None] >= 1)
    keep_FV &= sorted_FV >= min_p_F[:, None] * sorted_FV[:, :1]
    keep_FV[:, 0] = True
    return torch.zeros_like(probs_FV).scatter_(1, order_FV, sorted_FV * keep_FV)


def edit(logits_DV: Tensor, edits: Edits, send: Sender) -> Tensor:
    """The logits as the host wants them: penalties, then masks, then biases."""
    logits_DV = logits_DV.float()
    pairs = (edits.add_rows_E, edits.add_tokens_E, edits.scale_rows_E, edits.scale_tokens_E)
    add_rows, add_tokens, scale_rows, scale_tokens, bias_rows, bias_tokens, mask_rows = send(
        *pairs, edits.bias_rows_E, edits.bias_tokens_E, edits.mask_rows_K
    )
    add_E, scale_E, bias_E = send(edits.add_E, edits.scale_E, edits.bias_E)
    logits_DV = logits_DV.index_put((add_rows, add_tokens), add_E, accumulate=True)
    if len(edits.scale_E):
        old_E = logits_DV[scale_rows, scale_tokens]
        logits_DV[scale_rows, scale_tokens] = torch.where(old_E < 0, old_E * scale_E, old_E / scale_E)
    if len(edits.mask_rows_K):
        allowed_KV = _unpacked(send(edits.masks_KZ)[0], logits_DV.shape[1])
        masked_KV = logits_DV.index_select(0, mask_rows).masked_fill_(~allowed_KV, -torch.inf)
        logits_DV.index_copy_(0, mask_rows, masked_KV)
    return logits_DV.index_put_((bias_rows, bias_tokens), bias_E, accumulate=True)


def _unpacked(masks_KZ: Tensor, vocabulary: int) -> Tensor:
    """Bits as truth values [K, V]; tokens without a bit are not allowed."""
    bits_KZ32 = masks_KZ[..., None] >> torch.arange(32, device=masks_KZ.device, dtype=torch.int32)
    allowed_KV = (bits_KZ32 & 1).flatten(1).bool()[:, :vocabulary]
    return torch.nn.functional.pad(allowed_KV, (0, vocabulary - allowed_KV.shape[1]))


def look(logprobs_NV: Tensor, looks: Looks, send: Sender) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens of some rows, [R, k], with their log-probs; and the log-probs of some (row, token) pairs."""
    rows_R, watch_rows_W, watch_tokens_W = send(looks.rows_R, looks.watch_rows_W, looks.watch_tokens_W)
    best = logprobs_NV.index_select(0, rows_R).topk(looks.tops, dim=-1)
    return best.indices, best.values, logprobs_NV[watch_rows_W, watch_tokens_W]
