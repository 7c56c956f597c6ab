"""Attention of one row in one launch, against torch: heads made ready, then a look back over pages in float64."""

import pytest
import torch
from tests.kernels import interpreter  # noqa: F401
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.kernels.paged_case import case

from miles.kernels import alone
from miles.kernels.alone import attend_one, scratch
from miles.kernels.decode import decode_reference
from miles.kernels.prepare import Heads, prepare
from miles.kernels.tiling import Look

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
    return Heads(
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


def both(shape, length, dtype, *, room=None, **more):
    """What is wanted, what comes out, and the caches that each leaves; ``room``: scratch that was used before."""
    made = {name: more.pop(name) for name in ("norm", "interleaved") if name in more}
    heads = heads_of(shape, length - 1, dtype, **made)
    row = case([length], heads=shape[1], width=shape[2], dtype=dtype)
    qkv = random(1, (shape[0] + 2 * shape[1]) * shape[2], dtype=dtype)
    last = int(row.pages_SP[row.seats_B[0], (length - 1) // row.page_size])
    slot = torch.tensor([last * row.page_size + (length - 1) % row.page_size], device=DEVICE)
    wanted_k, wanted_v = row.k_SGd.clone(), row.v_SGe.clone()
    given = {name: getattr(heads, name) for name in Heads.__slots__}
    q = prepare(qkv, **given, key_slots=wanted_k, value_slots=wanted_v, slots_T=slot)
    look = {"window": None, "chunk": None, "softcap": None, "sinks_H": None, "scale": 0.3, "page_size": row.page_size}
    look |= more
    lengths, wide = torch.tensor([length], device=DEVICE), (each.double() for each in (q, wanted_k, wanted_v))
    wanted = decode_reference(*wide, row.pages_SP, row.seats_B, lengths, **look)
    room = room or scratch(shape[1], shape[0] // shape[1], shape[2], sms=8, device=DEVICE)
    read = (row.k_SGd, row.v_SGe, row.pages_SP, row.seats_B, slot)
    out = attend_one(qkv, heads, *read, Look(**look), room)
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
def test_scratch_serves_one_launch_after_another(poisoned):
    shape = SHAPES[0]
    room = scratch(shape[1], shape[0] // shape[1], shape[2], sms=8, device=DEVICE)
    for length in (300, 3, 190):
        agree(torch.float32, *both(shape, length, torch.float32, room=room))


@needs_triton
@pytest.mark.parametrize("sinks", [False, True])
def test_parts_may_be_joined_a_few_at_a_time(monkeypatch, poisoned, sinks):
    monkeypatch.setattr(alone, "_JOINED", 256)
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
    room = scratch(shape[1], shape[0] // shape[1], shape[2], sms=8, device=DEVICE)
    nowhere = torch.tensor([-1], device=DEVICE)
    look = Look(row.page_size, 0.3, None, None, None, None)
    out = attend_one(qkv, heads, row.k_SGd, row.v_SGe, row.pages_SP, row.seats_B, nowhere, look, room)
    assert out.isfinite().all() and torch.equal(before.nan_to_num(), row.k_SGd.nan_to_num())
