"""Fast paths of batch-invariant arithmetic on a CPU give the same bits."""

import pytest
import torch
from torch.nn import functional as F

from miles.kernels.attention.params import AttentionParams
from miles.kernels.batch_invariant import attention_reference
from miles.kernels.batch_invariant.attention_metadata import build_packed_spans
from miles.kernels.batch_invariant.attention_reference import reference_attention, reference_attention_backward
from miles.kernels.batch_invariant.logprob import CHUNK, compute_logprob_stats


@pytest.mark.parametrize("size", [1, 2, 28, 53, 1000, CHUNK - 1])
def test_a_small_vocabulary_is_summed_as_if_it_filled_a_chunk(size):
    torch.manual_seed(size)
    logits_RV, target_R = 3 * torch.randn(9, size), torch.randint(0, size, (9,))
    whole_RV = F.pad(logits_RV, (0, CHUNK - size), value=-torch.inf)
    for found, wanted in zip(
        compute_logprob_stats(logits_RV, target_R, 0.7), compute_logprob_stats(whole_RV, target_R, 0.7), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "params",
    [AttentionParams(scale=0.2), AttentionParams(scale=0.2, window=30), AttentionParams(scale=0.2, softcap=4.0)],
    ids=["all", "window", "cap"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_many_tiles_are_gathered_at_once_is_nothing_to_the_bits(monkeypatch, params, dtype):
    torch.manual_seed(0)
    lengths = [13] * 9 + [150, 2, 40]
    q_THd, k_TGd, v_TGe = (torch.randn(sum(lengths), heads, 24, dtype=dtype) for heads in (4, 2, 2))
    sinks_H = torch.randn(4, dtype=dtype)
    given = (q_THd, k_TGd, v_TGe, build_packed_spans(lengths), params, sinks_H)
    many = reference_attention(*given)
    monkeypatch.setattr(attention_reference, "_TILES_AT_ONCE", attention_reference._TILES)
    few = reference_attention(*given)
    assert all(torch.equal(a, b) for a, b in zip(many, few, strict=True))


def test_spans_of_one_shape_have_the_gradients_they_have_alone():
    torch.manual_seed(0)
    lengths, params = [13, 7, 13, 13, 7], AttentionParams(scale=0.2, window=9)
    q_THd, k_TGd, v_TGe, grad_THe = (torch.randn(sum(lengths), heads, 24) for heads in (4, 2, 2, 4))
    kept = (q_THd, k_TGd, v_TGe, *reference_attention(q_THd, k_TGd, v_TGe, build_packed_spans(lengths), params))
    together = reference_attention_backward(grad_THe, kept, build_packed_spans(lengths), params)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = reference_attention_backward(
            grad_THe[rows], tuple(x[rows] for x in kept), build_packed_spans([length]), params
        )
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[rows], b, rtol=1e-5, atol=1e-6)
        start += length
