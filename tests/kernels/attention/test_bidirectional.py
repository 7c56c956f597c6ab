"""Bidirectional attention within segments: the Triton kernel against torch's SDPA, segment by segment."""

import pytest
import torch
from tests.kernels.device import CARD, DEVICE, apart, needs_triton, random
from torch.nn import functional as F

from miles.kernels.attention.bidirectional import Segments
from miles.kernels.attention.bidirectional_triton import attend_segments, can_attend_segments, split_head_dim

DTYPE = torch.bfloat16 if CARD else torch.float16


def attend(q, k, v, lengths, scale):
    """The definition, in float64."""
    parts = zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True)
    heads = ([x.transpose(0, 1) for x in part] for part in parts)
    return torch.cat([F.scaled_dot_product_attention(*each, scale=scale).transpose(0, 1) for each in heads])


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "heads", "dim"),
    [([3], 2, 72), ([64], 1, 80), ([130, 7, 64], 2, 72), ([1, 200], 1, 88), ([65, 5], 2, 64), ([9, 70], 1, 128)],
)
def test_the_kernel_is_sdpa_of_every_segment(poisoned, lengths, heads, dim):
    tokens = sum(lengths)
    # As in a tower: queries and keys rotated in one tensor, values still in the projection.
    turned, projected = random(tokens, 2, heads, dim, dtype=DTYPE), random(tokens, 3, heads, dim, dtype=DTYPE)
    (q, k), v = turned.unbind(1), projected[:, 2]
    out = attend_segments(q, k, v, Segments(lengths, DEVICE).tiles, 0.2)
    assert out.shape == q.shape and out.dtype == DTYPE
    assert apart(out, attend(q, k, v, lengths, 0.2)) < (1e-2 if CARD else 1.5e-3)


@needs_triton
def test_a_segment_does_not_see_what_another_holds(poisoned):
    q, k, v = (random(100, 2, 72, dtype=DTYPE) for _ in range(3))
    tiles = Segments([30, 70], DEVICE).tiles
    before = attend_segments(q, k, v, tiles, 0.2)
    k[30:], v[30:] = 1e4, float("inf")
    after = attend_segments(q, k, v, tiles, 0.2)
    assert torch.equal(before[:30], after[:30]) and after[30:].isinf().all()


def test_tiles_cover_every_query_once():
    tiles = Segments([130, 1, 128], "cpu").tiles
    assert tiles.tolist() == [[0, 0, 130], [128, 0, 130], [130, 130, 131], [131, 131, 259]]


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 64, 72, 80, 88, 96, 112, 128])
def test_split_channels_hold_the_head_and_less_padding_than_a_power_of_two(dim):
    first, rest = split_head_dim(dim)
    assert first + rest >= dim and first + rest <= max(16, 1 << (dim - 1).bit_length())
    assert all(width == 0 or (width >= 16 and width & (width - 1) == 0) for width in (first, rest))


def test_the_kernel_is_for_inference_on_gpus_with_tma():
    assert not can_attend_segments(*(torch.zeros(4, 1, 72, dtype=torch.float16) for _ in range(3)))
