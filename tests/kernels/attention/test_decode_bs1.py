"""Attention of one row in one launch, against torch: heads made ready, then a look back over pages in float64."""

import pytest
import torch
from tests.kernels import interpreter  # noqa: F401
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.kernels.paged_case import case

from miles.kernels.attention import decode_bs1
from miles.kernels.attention.decode_bs1 import allocate_scratch, decode_bs1_attention
from miles.kernels.attention.paged_decode import decode_reference
from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.fused.qk_norm_rope import QKNormRopeParams, qk_norm_rope_write_kv
from miles.kernels.numerics import FAST

# Heads, key-value heads, channels, channels that turn.
SHAPES = [(4, 2, 32, 32), (3, 1, 24, 8), (2, 2, 16, 0), (8, 1, 32, 32), (5, 1, 16, 16)]
if CARD:
    SHAPES += [(16, 8, 128, 128), (32, 8, 128, 128), (32, 4, 128, 128), (16, 8, 256, 64), (14, 2, 64, 64)]
    SHAPES += [(40, 1, 64, 64)]
LENGTHS = [1, 2, 65, 300] + ([1025, 9000] if CARD else [])


def heads_of(shape, position, dtype, *, norm=True, interleaved=False):
    heads, kv_heads, dim, turned = shape
    angles = random(position + 1, turned // 2)
    table = torch.stack((torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)), 1)
    return QKNormRopeParams(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        rotation=table.to(dtype).contiguous() if turned else None,
        positions_T=torch.tensor([position], device=DEVICE),
        interleaved=interleaved,
        q_weight_d=random(dim, dtype=dtype) if norm else None,
        k_weight_d=random(dim, dtype=dtype) if norm else None,
        eps=1e-6,
        offset=0.0,
    )


def both(shape, length, dtype, *, room=None, position=None, **more):
    """What is wanted, what comes out, and the caches that each leaves; ``room``: scratch that was used before.

    ``position``: a rope position that is not the index of the token.
    """
    made = {name: more.pop(name) for name in ("norm", "interleaved") if name in more}
    heads = heads_of(shape, length - 1 if position is None else position, dtype, **made)
    start = None if position is None else torch.tensor([length - 1], dtype=torch.int32, device=DEVICE)
    row = case([length], heads=shape[1], width=shape[2], dtype=dtype)
    qkv = random(1, (shape[0] + 2 * shape[1]) * shape[2], dtype=dtype)
    last = int(row.block_table_SP[row.req_slots_B[0], (length - 1) // row.page_size])
    slot = torch.tensor([last * row.page_size + (length - 1) % row.page_size], device=DEVICE)
    wanted_k, wanted_v = row.k_SGd.clone(), row.v_SGe.clone()
    q = qk_norm_rope_write_kv(qkv, heads, key_slots=wanted_k, value_slots=wanted_v, slots_T=slot, numerics=FAST)
    params = PagedAttentionParams(row.page_size, 0.3, **more)
    lengths, wide = torch.tensor([length], device=DEVICE), (each.double() for each in (q, wanted_k, wanted_v))
    wanted = decode_reference(*wide, row.block_table_SP, row.req_slots_B, lengths, params)
    room = room or allocate_scratch(shape[1], shape[0] // shape[1], shape[2], sms=8, device=DEVICE)
    read = (row.k_SGd, row.v_SGe, row.block_table_SP, row.req_slots_B, slot)
    out = decode_bs1_attention(qkv, heads, *read, params, room, start)
    assert not room.done_G.any()
    return wanted.flatten(1), out, (wanted_k, row.k_SGd), (wanted_v, row.v_SGe)


def agree(dtype, wanted, out, *caches):
    assert apart(out, wanted) < 4 * ROUNDING[dtype]  # parts of the past are rounded each for itself
    for want, got in caches:
        assert torch.equal(want.isnan(), got.isnan())
        assert apart(got.nan_to_num(), want.nan_to_num()) < ROUNDING[dtype]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_launch_does_what_the_chain_does(poisoned, shape, length, dtype):
    agree(dtype, *both(shape, length, dtype))


@needs_triton
@pytest.mark.parametrize(
    "more",
    [
        *({"window": 70}, {"window": 1}, {"chunk": 128}, {"softcap": 3.0}, {"sinks_H": True}),
        *({"norm": False}, {"interleaved": True}),
    ],
    ids=lambda more: "-".join(map(str, *more.items())),
)
def test_every_way_of_looking_back_is_the_chains(poisoned, more):
    shape = SHAPES[0]
    if "sinks_H" in more:
        more = {"sinks_H": random(shape[0])}
    agree(torch.float32, *both(shape, 200, torch.float32, **more))


@needs_triton
@pytest.mark.parametrize("position", [3, 230])
def test_a_rope_position_need_not_be_the_index_of_the_token(poisoned, position):
    agree(torch.float32, *both(SHAPES[0], 200, torch.float32, position=position))


@needs_triton
def test_scratch_serves_one_launch_after_another(poisoned):
    shape = SHAPES[0]
    room = allocate_scratch(shape[1], shape[0] // shape[1], shape[2], sms=8, device=DEVICE)
    for length in (300, 3, 190):
        agree(torch.float32, *both(shape, length, torch.float32, room=room))


@needs_triton
@pytest.mark.parametrize("sinks", [False, True])
def test_parts_may_be_joined_a_few_at_a_time(monkeypatch, poisoned, sinks):
    monkeypatch.setattr(decode_bs1, "_REDUCED_ELEMENTS", 256)
    shape = (8, 1, 32, 32)
    more = {"sinks_H": random(shape[0])} if sinks else {}
    agree(torch.float32, *both(shape, 240, torch.float32, **more))


@needs_triton
def test_a_token_without_a_slot_leaves_nothing_and_is_seen_all_the_same(poisoned):
    shape, dtype = SHAPES[0], torch.float32
    heads = heads_of(shape, 40, dtype)
    row = case([41], heads=shape[1], width=shape[2], dtype=dtype)
    qkv = random(1, (shape[0] + 2 * shape[1]) * shape[2], dtype=dtype)
    before = row.k_SGd.clone()
    room = allocate_scratch(shape[1], shape[0] // shape[1], shape[2], sms=8, device=DEVICE)
    nowhere = torch.tensor([-1], device=DEVICE)
    look = PagedAttentionParams(row.page_size, 0.3)
    out = decode_bs1_attention(
        qkv, heads, row.k_SGd, row.v_SGe, row.block_table_SP, row.req_slots_B, nowhere, look, room
    )
    assert out.isfinite().all() and torch.equal(before.nan_to_num(), row.k_SGd.nan_to_num())
