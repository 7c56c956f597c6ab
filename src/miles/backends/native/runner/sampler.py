"""Sampler of the torch path: logit edits, temperature, top-k/top-p/min-p, and inverse-CDF sampling with log-probs.

The seed and the position of a token give one uniform number, the inverse CDF gives the token; so a sample does not
depend on the batch it is in.

Shapes: D sampled rows, V vocabulary, F rows with a filter, N rows; of edits and queries as in ``forward_batch``. All
arithmetic is float32. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import LogitEdits, LogprobQueries, SamplingBatch
from miles.kernels.batch_invariant.elementwise import map_elements
from miles.kernels.batch_invariant.logprob import compute_target_logprobs, logsumexp
from miles.kernels.numerics import Numerics

SendArrays = Callable[..., list[Tensor]]
"""Copies arrays of one dtype to the device (``model_runner.HostToDevice``)."""


def sample(
    logits_DV: Tensor, sampling: SamplingBatch, send: SendArrays, *, numerics: Numerics
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their log-probs, and all log-probs under the temperature (1 if greedy) before any filter."""
    logits_DV = logits_DV.float()
    greedy_D = sampling.temperature_D == 0
    temperature_D = np.where(greedy_D, np.float32(1), sampling.temperature_D)
    device_temperature_D, uniform_D = send(temperature_D, sampling.uniform_D)
    lse_D: Tensor | None = None
    if numerics.batch_invariant:
        logprobs_DV, lse_D = batch_invariant_logprobs(logits_DV, device_temperature_D)
    else:
        if (temperature_D != 1).any():
            logits_DV = logits_DV / device_temperature_D[:, None]
        logprobs_DV = torch.log_softmax(logits_DV, -1)
    if greedy_D.all():
        tokens_D = logits_DV.argmax(-1)
    else:
        probs_DV = map_elements(torch.exp, logprobs_DV) if numerics.batch_invariant else logprobs_DV.exp()
        if sampling.has_filter_D.any():
            _filter_rows(probs_DV, sampling, send)
        tokens_D = sample_inverse_cdf(probs_DV, uniform_D)
        if greedy_D.any():
            tokens_D = torch.where(send(greedy_D)[0], logits_DV.argmax(-1), tokens_D)
    if lse_D is not None:
        return tokens_D, compute_target_logprobs(logits_DV, tokens_D, device_temperature_D, lse_D), logprobs_DV
    return tokens_D, logprobs_DV.gather(1, tokens_D[:, None]).squeeze(1), logprobs_DV


def batch_invariant_logprobs(logits_NV: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return all log-probs under temperatures above 0, correct up to the last bit, and their exact log-sum-exps."""
    lse_N = logsumexp(logits_NV, temperature_N)
    inverse_N = torch.ones_like(temperature_N) / temperature_N
    return logits_NV * inverse_N[:, None] - lse_N[:, None], lse_N


def sample_inverse_cdf(probs_DV: Tensor, uniform_D: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds the uniform number; never one of probability 0."""
    cdf_DV = probs_DV.cumsum(-1)
    target_D1 = uniform_D[:, None] * cdf_DV[:, -1:]
    tokens_D1 = torch.searchsorted(cdf_DV, target_D1, right=True).clamp_(max=probs_DV.shape[1] - 1)
    # The target, or a parallel cumsum, may round up to the total. Asking a GPU whether it did would synchronize.
    impossible_D1 = probs_DV.gather(1, tokens_D1) <= 0
    if impossible_D1.is_cuda or impossible_D1.any():
        tokens_D1 = torch.where(impossible_D1, probs_DV.argmax(-1, keepdim=True), tokens_D1)
    return tokens_D1.squeeze(1)


def _filter_rows(probs_DV: Tensor, sampling: SamplingBatch, send: SendArrays) -> None:
    """Zero in place what top-k, then top-p, then min-p remove, in the rows that have a filter."""
    rows = np.flatnonzero(sampling.has_filter_D)
    rows_F, top_k_F = send(rows, sampling.top_k_D[rows])
    top_p_F, min_p_F = send(sampling.top_p_D[rows], sampling.min_p_D[rows])
    filtered_FV = filter_probs(probs_DV.index_select(0, rows_F), top_k_F, top_p_F, min_p_F)
    probs_DV.index_copy_(0, rows_F, filtered_FV)


def filter_probs(probs_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor, min_p_F: Tensor) -> Tensor:
    """Keep the top k tokens; of these the fewest with mass top-p; of these, those above min-p of the best."""
    sorted_FV, indices_FV = probs_FV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_FV.shape[1], device=probs_FV.device)
    keep_FV = (rank_V < top_k_F[:, None]) | (top_k_F[:, None] <= 0)
    sorted_FV = sorted_FV * keep_FV
    sum_FV = sorted_FV.cumsum(-1)
    keep_FV &= (sum_FV - sorted_FV < top_p_F[:, None] * sum_FV[:, -1:]) | (top_p_F[:, None] >= 1)
    keep_FV &= sorted_FV >= min_p_F[:, None] * sorted_FV[:, :1]
    keep_FV[:, 0] = True
    return torch.zeros_like(probs_FV).scatter_(1, indices_FV, sorted_FV * keep_FV)


def apply_logit_edits(logits_DV: Tensor, edits: LogitEdits, send: SendArrays) -> Tensor:
    """Apply penalties, then grammar masks, then biases."""
    logits_DV = logits_DV.float()
    add_rows, add_tokens, scale_rows, scale_tokens, bias_rows, bias_tokens, mask_rows = send(
        edits.add_rows_E,
        edits.add_tokens_E,
        edits.scale_rows_E,
        edits.scale_tokens_E,
        edits.bias_rows_E,
        edits.bias_tokens_E,
        edits.mask_rows_K,
    )
    add_E, scale_E, bias_E = send(edits.add_E, edits.scale_E, edits.bias_E)
    logits_DV = logits_DV.index_put((add_rows, add_tokens), add_E, accumulate=True)
    if len(edits.scale_E):
        old_E = logits_DV[scale_rows, scale_tokens]
        logits_DV[scale_rows, scale_tokens] = torch.where(old_E < 0, old_E * scale_E, old_E / scale_E)
    if len(edits.mask_rows_K):
        allowed_KV = _unpack_mask(send(edits.masks_KZ)[0], logits_DV.shape[1])
        masked_KV = logits_DV.index_select(0, mask_rows).masked_fill_(~allowed_KV, -torch.inf)
        logits_DV.index_copy_(0, mask_rows, masked_KV)
    return logits_DV.index_put_((bias_rows, bias_tokens), bias_E, accumulate=True)


def _unpack_mask(masks_KZ: Tensor, vocab_size: int) -> Tensor:
    """Convert bits to booleans [K, V]; tokens without a bit are not allowed."""
    bits_KZ32 = masks_KZ[..., None] >> torch.arange(32, device=masks_KZ.device, dtype=torch.int32)
    allowed_KV = (bits_KZ32 & 1).flatten(1).bool()[:, :vocab_size]
    return torch.nn.functional.pad(allowed_KV, (0, vocab_size - allowed_KV.shape[1]))


def gather_logprobs(logprobs_NV: Tensor, queries: LogprobQueries, send: SendArrays) -> tuple[Tensor, Tensor, Tensor]:
    """Return the top-k tokens [R, k] of the queried rows, their log-probs, and those of the (row, token) pairs."""
    rows_R, token_rows_W, tokens_W = send(queries.rows_R, queries.token_rows_W, queries.tokens_W)
    top = logprobs_NV.index_select(0, rows_R).topk(queries.top_k, dim=-1)
    return top.indices, top.values, logprobs_NV[token_rows_W, tokens_W]
