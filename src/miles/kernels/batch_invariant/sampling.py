"""Batch-invariant sampling: one token per row from its logits, with the log-prob that a trainer will compute for it.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.batch_invariant.elementwise import map_elements
from miles.kernels.batch_invariant.logprob import CHUNK, compute_target_logprobs, merge_chunks, reduce_chunks
from miles.kernels.runtime.triton_compat import use_triton
from miles.kernels.sampling import sample as sample


def sample_tokens(
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
    """As ``sampling.sample.sample_tokens``; a row's token does not depend on the other rows of the batch."""
    if len(logits_BV) == 0:
        return
    limits = (top_k_B, top_p_B, min_p_B) if filters else None
    chunks = reduce_chunks(logits_BV, temperature_B)
    lse_B, _ = merge_chunks(chunks)
    if use_triton(logits_BV):
        assert sample.CHUNK == CHUNK
        chunk_stats = (chunks.max_RC, chunks.sums_RC)
        sample.launch_sampling(logits_BV, temperature_B, uniform_B, limits, tokens_out_B, logprobs_out_B, chunk_stats)
    else:
        tokens_out_B.copy_(_sample_torch(logits_BV, temperature_B, uniform_B, limits, lse_B))
    compute_target_logprobs(logits_BV, tokens_out_B, temperature_B, lse_B, logprobs_out_B)


def _sample_torch(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    limits: tuple[Tensor, Tensor, Tensor] | None,
    lse_B: Tensor,
) -> Tensor:
    """Sampled tokens in torch, whose cumsums and sorts are row by row."""
    temperature_B1 = temperature_B[:, None]
    probs_BV = map_elements(torch.exp, logits_BV / torch.where(temperature_B1 == 0, 1, temperature_B1) - lse_B[:, None])
    filtered_BV = probs_BV if limits is None else sample.filter_probs(probs_BV, *limits)
    return torch.where(
        temperature_B1 == 0, logits_BV.argmax(-1, keepdim=True), sample.invert_cdf(filtered_BV, uniform_B)
    ).squeeze(1)
