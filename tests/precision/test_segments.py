"""Packed weights are split and concatenated by rows without a change of bytes, and words hold what was packed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.precision.formats import FORMATS
from miles.precision.quantize import quantize
from miles.precision.segments import concat_segments, split_segments, stack, unstack
from miles.precision.unpack import pack_words, unpack_row_words, unpack_words


def equal(ours, theirs):
    pairs = zip(ours.tensors("w").items(), theirs.tensors("w").items(), strict=True)
    return ours.row_block == theirs.row_block and all(
        a == b and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        for (a, x), (b, y) in pairs
    )


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from([8, 64, 128, 256]), min_size=1, max_size=3),
    st.sampled_from([1, 2]),
    st.integers(0, 3),
)
def test_a_fused_weight_is_the_weights_it_consists_of(name, segments, shards, seed):
    torch.manual_seed(seed)
    weight, format = torch.randn(sum(segments), 256), FORMATS[name]
    whole = quantize(weight, format, segments, shards)
    parts = split_segments(whole, segments)
    for part, rows in zip(parts, weight.split(segments), strict=True):
        assert equal(part, quantize(rows, format, global_scale=whole.global_scale))
    assert equal(concat_segments(parts, shards), whole)
    assert equal(unstack(stack([whole, whole]))[1], whole)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 20), st.integers(0, 3))
def test_words_hold_the_values_that_were_packed(bits, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    words = pack_words(values, bits)
    assert words.dtype == torch.int32 and words.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack_words(words, bits)[:, :columns], values)
    assert torch.equal(unpack_row_words(words.T, bits)[:columns], values.T)
