"""Attention over an FP8 KV cache: what attention over the dequantized keys and values gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import interpreter  # noqa: F401
from tests.kernels.attention.test_decode_bs1 import heads_of
from tests.kernels.attention.test_paged import CPU, LENGTHS, SCALE, WAYS, Story, close
from tests.kernels.device import CARD, DEVICE, ROUNDING, apart, needs_triton, random
from tests.kernels.paged_case import Case, case

from miles.kernels.attention.decode_bs1 import allocate_scratch, decode_bs1_attention
from miles.kernels.attention.mla import (
    count_head_tiles,
    mla_decode_attention,
    mla_decode_reference,
    mla_prefill_attention,
    mla_prefill_reference,
)
from miles.kernels.attention.paged import KvShape, PagedKVCache, build_attention_metadata
from miles.kernels.attention.paged_decode import decode_attention, decode_reference
from miles.kernels.attention.paged_prefill import build_prefill_tiles, prefill_attention, prefill_reference
from miles.kernels.attention.params import AttentionInputs, AttentionParams, PagedAttentionParams
from miles.kernels.batch_invariant import attention_paged as invariant
from miles.kernels.batch_invariant.attention_split_kv import BatchInvariantSplitKVPlan
from miles.kernels.batch_invariant.paged_attention import BatchInvariantPagedBackend
from miles.kernels.fused.qk_norm_rope import qk_norm_rope_write_kv
from miles.kernels.numerics import FAST
from miles.kernels.runtime.kv_cache import KVScales
from miles.precision.kv_cache import quantize_kv, round_kv

DTYPE = torch.bfloat16 if CARD else torch.float32
HALVES = [torch.bfloat16, torch.float16]
LOOKS = {
    "all": {},
    "a window": {"window": 30},
    "chunks": {"chunk": 48},
    "bounded scores": {"softcap": 1.3},
    "sinks": {"sinks_H": True},
}

# -- torch ------------------------------------------------------------------------------------


def fp8_story(shape: KvShape, page_size: int = 4, parts: tuple[int, ...] = (), **more) -> Story:
    """A story in an FP8 cache, whose numbers are those that the cache returns."""
    story = Story(shape, 4, page_size, **more)
    parts = parts or (shape.key_dim,)
    story.k = [torch.cat([round_kv(part) for part in k.split(parts, -1)], -1) for k in story.k]
    story.v = [round_kv(v) for v in story.v] if shape.value_dim else [k[..., : parts[0]] for k in story.k]
    pages = int(story.pages.max()) + 9
    story.cache = PagedKVCache(
        story.layers * [shape], pages=pages, page_size=page_size, device=CPU, dtype=torch.float32, kv_dtype="fp8_e4m3"
    )
    return story


def remember(story: Story) -> None:
    for row, (start, _) in enumerate(story.lengths):
        token = np.arange(start)
        slots = story.pages[row, token // story.page_size] * story.page_size + token % story.page_size
        for held in story.cache.layers.values():
            held.keys.write(torch.from_numpy(slots), story.k[row][:start])
            if held.values is not None:
                held.values.write(torch.from_numpy(slots), story.v[row][:start])


@pytest.mark.parametrize("shape", [KvShape(2, 8, 8), KvShape(2, 8, 6), KvShape(1, 9, 0, 0, 4)], ids=str)
@pytest.mark.parametrize("way", ["all", "a window", "chunks", "bounded scores in a window"])
def test_new_tokens_see_their_sequence_as_the_cache_holds_it(way, shape):
    from miles.kernels.attention.paged import PagedAttentionBackend

    story = fp8_story(shape, parts=(5, 4) if shape.rope_dim else ())
    remember(story)
    params = AttentionParams(scale=SCALE, **WAYS[way])
    close(story.asked(PagedAttentionBackend(story.cache, story.layout), params), story.expected(params))


def test_batch_invariant_attention_has_the_bits_of_the_dequantized_cache():
    starts, counts = (np.array(column) for column in zip(*LENGTHS, strict=True))
    story, params = fp8_story(KvShape(2, 8, 8)), AttentionParams(scale=SCALE)
    remember(story)
    inputs = AttentionInputs(story.new(story.q), story.new(story.k), story.new(story.v), params)
    ours = BatchInvariantPagedBackend(story.cache, starts, counts, story.pages, 4)(0, inputs)
    wide = Story(story.shape, 4, 4)
    wide.k, wide.v = story.k, story.v
    wide.attend()
    assert torch.equal(ours, BatchInvariantPagedBackend(wide.cache, starts, counts, wide.pages, 4)(0, inputs))


def test_a_copied_page_takes_its_scales_along():
    shapes = [KvShape(2, 8, 6), KvShape(1, 12, 0, 3, 4)]
    cache = PagedKVCache(shapes, pages=4, page_size=2, device=CPU, dtype=torch.float32, kv_dtype="fp8_e4m3")
    held = [cache.layers[0].keys, cache.layers[0].values, cache.layers[1].keys]
    for paged, heads, width in zip(held, (2, 2, 1), (8, 6, 12), strict=True):
        paged.write(torch.arange(8), torch.randn(8, heads, width) * torch.arange(1, 9)[:, None, None])
    before = [paged.read_slots(torch.arange(8)) for paged in held]
    cache.copy(np.array([0, 1]), np.array([1, 3]))
    for paged, old in zip(held, before, strict=True):
        assert torch.equal(paged.read_slots(torch.arange(8)), old[[0, 1, 0, 1, 4, 5, 2, 3]])
        assert torch.equal(paged.read(torch.tensor([3, 0]), 1, 3)[0], old[[2, 3, 0]])
    index = cache.layers[1].index
    assert index is not None and index.slots.dtype == torch.float32  # an indexer's keys stay wide


# -- Triton -----------------------------------------------------------------------------------


def fp8(made: Case) -> tuple[Case, Case, KVScales]:
    """The case in FP8, the same numbers in the wide dtype, and scales; unused slots hold no numbers in any of them."""
    heads = made.k_SGd.shape[1]
    results = [quantize_kv(x) for x in (made.k_SGd, made.v_SGe)]
    unused = made.k_SGd.isnan().any(-1)
    scales = []
    for _, scale_SG in results:
        scale_SG[unused] = torch.nan
        scales.append(scale_SG.view(-1, made.page_size, heads).mT.contiguous())
    codes = [data.view(torch.uint8) for data, _ in results]
    wide = [round_kv(x) for x in (made.k_SGd, made.v_SGe)]
    narrow = replace(made, k_SGd=codes[0], v_SGe=codes[1])
    return narrow, replace(made, k_SGd=wide[0], v_SGe=wide[1]), KVScales(*scales)


def uneven(made: Case) -> Case:
    """The case with keys and values of very different magnitudes from token to token."""
    factor_S11 = torch.exp2(random(len(made.k_SGd), 1, 1) * 3).to(made.k_SGd.dtype)
    return replace(made, k_SGd=made.k_SGd * factor_S11, v_SGe=made.v_SGe * factor_S11.flip(0))


def look(made: Case, heads: int, way: str) -> PagedAttentionParams:
    limits = dict(LOOKS[way])
    if "sinks_H" in limits:
        limits["sinks_H"] = random(heads, dtype=DTYPE)
    return PagedAttentionParams(made.page_size, SCALE, **limits)


def same(ours: torch.Tensor, wide: torch.Tensor) -> bool:
    """Powers of two commute with rounding: the bits are equal, if matmuls are of equal shape and order."""
    return torch.equal(ours, wide) if not CARD else apart(ours, wide) < ROUNDING[DTYPE]


@needs_triton
@pytest.mark.parametrize("way", LOOKS)
def test_decode_has_the_bits_of_the_wide_cache(way):
    made = case([100, 90, 0, 70, 1], [(0, 2, 64)], heads=2, width=16, dtype=DTYPE)
    narrow, wide, scales = fp8(made)
    q, params = random(5, 4, 16, dtype=DTYPE), look(made, 4, way)
    table, slots = made.block_table_SP, made.req_slots_B
    reach = {name: value for name, value in LOOKS[way].items() if name in ("window", "chunk")}
    work = made.work(2, **reach)
    quantized = params._replace(kv_scales=scales)
    ours = decode_attention(q, narrow.k_SGd, narrow.v_SGe, table, slots, work, quantized)
    assert same(ours, decode_attention(q, wide.k_SGd, wide.v_SGe, table, slots, work, params))
    lengths = torch.from_numpy(made.lengths).to(DEVICE)
    wanted = decode_reference(q, narrow.k_SGd, narrow.v_SGe, table, slots, lengths, quantized)
    assert apart(ours, wanted) < ROUNDING[DTYPE]


@needs_triton
@pytest.mark.parametrize("way", LOOKS)
def test_prefill_has_the_bits_of_the_wide_cache(way):
    made = case([70, 33], heads=1, width=16, page_size=8, dtype=DTYPE)
    narrow, wide, scales = fp8(made)
    starts, counts = np.array([60, 25]), np.array([10, 8])
    tiles = build_prefill_tiles(starts, counts, made.req_slots_B.cpu().numpy(), 0)
    q, params = random(18, 2, 16, dtype=DTYPE), look(made, 2, way)
    rest = (made.block_table_SP, torch.from_numpy(tiles).to(DEVICE))
    quantized = params._replace(kv_scales=scales)
    ours = prefill_attention(q, narrow.k_SGd, narrow.v_SGe, *rest, quantized)
    assert same(ours, prefill_attention(q, wide.k_SGd, wide.v_SGe, *rest, params))
    assert apart(ours, prefill_reference(q, narrow.k_SGd, narrow.v_SGe, *rest, quantized)) < ROUNDING[DTYPE]


@needs_triton
@pytest.mark.parametrize("way", ["all", "a window", "bounded scores"])
def test_batch_invariant_kernels_have_the_bits_of_the_wide_cache(way):
    made = case([100, 90, 0, 530], [(0, 2, 64)], heads=1, width=16, dtype=DTYPE)
    narrow, wide, scales = fp8(made)
    params = look(made, 2, way)
    reach = {name: value for name, value in LOOKS[way].items() if name in ("window", "chunk")}
    plan = BatchInvariantSplitKVPlan(6, 64, DEVICE, prefix_queries=16)
    plan.fill(made.lengths, made.group, made.shared, kv_heads=1, queries_per_kv=2, sms=1, **reach)
    plan.copy_to_device()
    q, results = random(4, 2, 16, dtype=DTYPE), []
    for held, chosen in ((narrow, params._replace(kv_scales=scales)), (wide, params)):
        read = (q, held.k_SGd, held.v_SGe, made.block_table_SP, made.req_slots_B)
        results.append(invariant.decode_attention(*read, plan, chosen))
    assert torch.equal(*results)
    tiles = build_prefill_tiles(np.array([20, 525]), np.array([9, 5]), made.req_slots_B.cpu().numpy()[[0, 3]], 0)
    q, results = random(14, 2, 16, dtype=DTYPE), []
    for held, chosen in ((narrow, params._replace(kv_scales=scales)), (wide, params)):
        read = (q, held.k_SGd, held.v_SGe, made.block_table_SP, torch.from_numpy(tiles).to(DEVICE))
        results.append(invariant.prefill_attention(*read, chosen))
    assert torch.equal(*results)


@needs_triton
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("prefix_queries", [16, 64])  # in pairs of channels, and as bytes
@pytest.mark.parametrize("way", LOOKS)
def test_half_precision_decode_is_attention_over_the_dequantized_cache(way, prefix_queries, dtype):
    made = case([100, 90, 0, 70, 1], [(0, 2, 64)], heads=2, dtype=dtype)
    narrow, _, scales = fp8(uneven(made))
    reach = {name: value for name, value in LOOKS[way].items() if name in ("window", "chunk")}
    q, params = random(5, 4, 32, dtype=dtype), look(made, 4, way)._replace(kv_scales=scales)
    read = (narrow.k_SGd, narrow.v_SGe, made.block_table_SP, made.req_slots_B)
    ours = decode_attention(q, *read, made.work(2, prefix_queries=prefix_queries, **reach), params)
    wanted = decode_reference(q.double(), *read, torch.from_numpy(made.lengths).to(DEVICE), params)
    assert apart(ours, wanted) < ROUNDING[dtype] / 2


@needs_triton
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", LOOKS)
def test_half_precision_prefill_is_attention_over_the_dequantized_cache(way, dtype):
    made = case([70, 33], heads=1, width=24, page_size=8, dtype=dtype)
    narrow, _, scales = fp8(uneven(made))
    tiles = build_prefill_tiles(np.array([60, 25]), np.array([10, 8]), made.req_slots_B.cpu().numpy(), 0)
    q, params = random(18, 2, 24, dtype=dtype), look(made, 2, way)._replace(kv_scales=scales)
    read = (narrow.k_SGd, narrow.v_SGe, made.block_table_SP, torch.from_numpy(tiles).to(DEVICE))
    ours = prefill_attention(q, *read, params)
    assert apart(ours, prefill_reference(q.double(), *read, params)) < ROUNDING[dtype] / 2


@needs_triton
def test_queries_values_and_weights_outside_the_range_of_float16():
    """Queries of 200,000; a token with nearly all of the weight and a value 2**-20 of the others'."""
    made = case([100, 40], heads=1, dtype=torch.bfloat16)
    made.k_SGd.nan_to_num_(0.0).mul_(0.1)
    for row in range(2):
        first = int(made.block_table_SP[made.req_slots_B[row], 0]) * made.page_size
        made.k_SGd[first + 3] = 1.0
        made.v_SGe[first + 3] *= 2.0**-20
    narrow, _, scales = fp8(made)
    q = torch.full((2, 2, 32), 200000.0, dtype=torch.bfloat16, device=DEVICE)
    read = (q, narrow.k_SGd, narrow.v_SGe, made.block_table_SP, made.req_slots_B)
    for scale in (1e-5, 3e-6, 1e-6):  # the weight of the token: nearly one, most, and little of the whole
        params = PagedAttentionParams(16, scale, kv_scales=scales)
        ours = decode_attention(*read, made.work(2), params)
        wanted = decode_reference(q.double(), *read[1:], torch.from_numpy(made.lengths).to(DEVICE), params)
        assert apart(ours, wanted) < ROUNDING[torch.bfloat16] / 2


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("length", [1, 65, 300])
@pytest.mark.parametrize("shape", [(4, 2, 32, 32), (3, 1, 24, 8)])
def test_one_row_in_one_launch_does_what_the_chain_does(poisoned, shape, length, dtype):
    heads = heads_of(shape, length - 1, dtype)
    row = case([length], heads=shape[1], width=shape[2], dtype=dtype)
    narrow, _, scales = fp8(row)
    qkv = random(1, (shape[0] + 2 * shape[1]) * shape[2], dtype=dtype)
    last = int(row.block_table_SP[row.req_slots_B[0], (length - 1) // row.page_size])
    slot = torch.tensor([last * row.page_size + (length - 1) % row.page_size], device=DEVICE)
    wanted_k, wanted_v = narrow.k_SGd.clone(), narrow.v_SGe.clone()
    wanted_scales = KVScales(*(each.clone() for each in scales))
    q = qk_norm_rope_write_kv(
        qkv,
        heads,
        key_slots=wanted_k,
        value_slots=wanted_v,
        slots_T=slot,
        numerics=FAST,
        scales=wanted_scales,
    )
    params, lengths = PagedAttentionParams(row.page_size, 0.3), torch.tensor([length], device=DEVICE)
    read = (row.block_table_SP, row.req_slots_B)
    wanted = decode_reference(q.double(), wanted_k, wanted_v, *read, lengths, params._replace(kv_scales=wanted_scales))
    room = allocate_scratch(shape[1], shape[0] // shape[1], shape[2], sms=8, device=DEVICE)
    ours = decode_bs1_attention(
        qkv, heads, narrow.k_SGd, narrow.v_SGe, *read, slot, params._replace(kv_scales=scales), room
    )
    assert apart(ours, wanted.flatten(1)) < 4 * ROUNDING[dtype]
    assert torch.equal(narrow.v_SGe, wanted_v) and (narrow.k_SGd == wanted_k).float().mean() > 0.99
    for got, want in zip(scales, wanted_scales, strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


@needs_triton
@pytest.mark.parametrize(
    ("heads", "dtype"),  # tiles of 16 and 64 queries
    [(4, torch.float32), (4, torch.bfloat16), (4, torch.float16), (40, torch.bfloat16)],
)
def test_a_latent_and_its_rope_channels_have_scales_of_their_own(heads, dtype):
    parts, size = (32, 16), 8
    lengths = [70, 9]
    made = case(lengths, heads=1, width=48, page_size=size, dtype=dtype)
    latent = made.k_SGd * torch.cat((torch.ones(32), torch.full((16,), 300.0))).to(DEVICE, dtype)
    quantized = [quantize_kv(part) for part in latent.split(parts, -1)]
    codes = torch.cat([data.view(torch.uint8) for data, _ in quantized], -1)
    scales_P2p = torch.cat([scale for _, scale in quantized], 1).view(-1, size, 2).mT.contiguous()
    params = PagedAttentionParams(size, 0.001, kv_scales=KVScales(scales_P2p, scales_P2p))
    q = random(2, heads, 48, dtype=dtype)
    work = made.work(heads, kv_heads=count_head_tiles(heads))
    table, slots = made.block_table_SP, made.req_slots_B
    ours = mla_decode_attention(q, codes, table, slots, work, params, value_dim=32)
    read = torch.tensor(lengths, device=DEVICE)
    wanted = mla_decode_reference(q.double(), codes, table, slots, read, params, value_dim=32)
    assert apart(ours, wanted) < ROUNDING[dtype]
    wide = torch.cat([round_kv(part) for part in latent.split(parts, -1)], -1)
    plain = params._replace(kv_scales=None)
    assert apart(wanted, mla_decode_reference(q.double(), wide, table, slots, read, plain, value_dim=32)) < 1e-6
    tiles = build_prefill_tiles(np.array([60]), np.array([9]), made.req_slots_B.cpu().numpy()[:1], 0)
    q, tiles = random(9, heads, 48, dtype=dtype), torch.from_numpy(tiles).to(DEVICE)
    ours = mla_prefill_attention(q, codes, table, tiles, params, value_dim=32)
    assert apart(ours, mla_prefill_reference(q.double(), codes, table, tiles, params, value_dim=32)) < ROUNDING[dtype]


def test_chunks_of_a_prompt_leave_the_cache_that_the_whole_prompt_leaves():
    from miles.kernels.attention.paged import PagedAttentionBackend

    caches = []
    q, k, v = (torch.randn(20, heads, 8, generator=torch.Generator().manual_seed(0)) for heads in (4, 2, 2))
    pages = np.arange(5)[None]
    for cuts in ([20], [7, 1, 12]):
        cache = PagedKVCache(
            [KvShape(2, 8, 8)], pages=5, page_size=4, device=CPU, dtype=torch.float32, kv_dtype="fp8_e4m3"
        )
        start, outs = 0, []
        for count in cuts:
            _, layout = build_attention_metadata(
                np.array([start]), np.array([count]), pages, 4, device=CPU, dtype=torch.float32
            )
            end = start + count
            inputs = AttentionInputs(q[start:end], k[start:end], v[start:end], AttentionParams(scale=SCALE))
            outs.append(PagedAttentionBackend(cache, layout)(0, inputs))
            start = end
        caches.append((torch.cat(outs), cache.layers[0]))
    (whole, one), (chunked, other) = caches
    close(chunked, whole)
    for a, b in ((one.keys, other.keys), (one.values, other.values)):
        assert torch.equal(a.slots, b.slots) and torch.equal(a.scales, b.scales)
