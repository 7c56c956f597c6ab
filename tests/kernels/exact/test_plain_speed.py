"""What makes exact arithmetic quicker on a CPU is nothing to its bits."""

import pytest
import torch
from torch.nn import functional as F

from miles.kernels.exact import attention_plain
from miles.kernels.exact.attention_plain import plain_attention, plain_backward
from miles.kernels.exact.attention_spans import packed_spans
from miles.kernels.exact.head import CHUNK, scores_of
from miles.kernels.terms import Terms


@pytest.mark.parametrize("size", [1, 2, 28, 53, 1000, CHUNK - 1])
def test_a_small_vocabulary_is_summed_as_if_it_filled_a_chunk(size):
    torch.manual_seed(size)
    logits_RV, target_R = 3 * torch.randn(9, size), torch.randint(0, size, (9,))
    whole_RV = F.pad(logits_RV, (0, CHUNK - size), value=-torch.inf)
    for found, wanted in zip(scores_of(logits_RV, target_R, 0.7), scores_of(whole_RV, target_R, 0.7), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "terms",
    [Terms(scale=0.2), Terms(scale=0.2, window=30), Terms(scale=0.2, softcap=4.0)],
    ids=["all", "window", "cap"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_many_tiles_are_gathered_at_once_is_nothing_to_the_bits(monkeypatch, terms, dtype):
    torch.manual_seed(0)
    lengths = [13] * 9 + [150, 2, 40]
    q_THd, k_TGd, v_TGe = (torch.randn(sum(lengths), heads, 24, dtype=dtype) for heads in (4, 2, 2))
    sinks_H = torch.randn(4, dtype=dtype)
    given = (q_THd, k_TGd, v_TGe, packed_spans(lengths), terms, sinks_H)
    many = plain_attention(*given)
    monkeypatch.setattr(attention_plain, "_AT_ONCE", attention_plain._TILES)
    few = plain_attention(*given)
    assert all(torch.equal(a, b) for a, b in zip(many, few, strict=True))


def test_spans_of_one_shape_have_the_gradients_they_have_alone():
    torch.manual_seed(0)
    lengths, terms = [13, 7, 13, 13, 7], Terms(scale=0.2, window=9)
    q_THd, k_TGd, v_TGe, grad_THe = (torch.randn(sum(lengths), heads, 24) for heads in (4, 2, 2, 4))
    kept = (q_THd, k_TGd, v_TGe, *plain_attention(q_THd, k_TGd, v_TGe, packed_spans(lengths), terms))
    together = plain_backward(grad_THe, kept, packed_spans(lengths), terms)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = plain_backward(grad_THe[rows], tuple(x[rows] for x in kept), packed_spans([length]), terms)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[rows], b, rtol=1e-5, atol=1e-6)
        start += length
