"""Device code of exact attention: right by the formula, and on a card the same bits in every form."""

import numpy as np
import pytest
import tests.kernels.interpreter  # noqa: F401  (loops in the interpreter)
import torch
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.kernels.paged_case import Case, case, poisoned

from miles.kernels.attention import decode_bs1
from miles.kernels.attention.gpu_backend import DecodeShape, SplitKVPlans, StepMetadata, TritonAttentionBackend
from miles.kernels.attention.paged_decode import decode_reference
from miles.kernels.attention.paged_prefill import build_prefill_tiles, prefill_reference
from miles.kernels.attention.params import AttentionInputs, AttentionParams, PagedAttentionParams
from miles.kernels.batch_invariant.attention import launch_backward, launch_forward
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans, SpanBatch, build_packed_spans
from miles.kernels.batch_invariant.attention_paged import decode_attention, prefill_attention
from miles.kernels.batch_invariant.attention_reference import reference_attention, reference_attention_backward
from miles.kernels.batch_invariant.attention_split_kv import BatchInvariantSplitKVPlan
from miles.kernels.batch_invariant.paged_attention import (
    BatchInvariantPagedBackend,
    BatchInvariantSplitKVPlans,
    BatchInvariantTritonBackend,
)
from miles.kernels.fused.qk_norm_rope import QKNormRopeParams
from miles.kernels.runtime.kv_cache import KvShape, PagedKVCache

pytestmark = needs_triton

WAYS = {
    "all": AttentionParams(scale=0.3),
    "a window": AttentionParams(scale=0.3, window=70),
    "a window of one": AttentionParams(scale=0.3, window=1),
    "chunks": AttentionParams(scale=0.3, chunk=90),
    "bounded scores": AttentionParams(scale=0.3, softcap=2.0),
}


def cut(
    made: Case, queries: int, params: AttentionParams, *, trunks: bool = True, items: int = 64
) -> BatchInvariantSplitKVPlan:
    work = BatchInvariantSplitKVPlan(len(made.lengths) + 2, items, DEVICE)
    shared = made.shared if trunks else np.zeros_like(made.shared)
    work.fill(
        *(made.lengths, made.group, shared),
        kv_heads=made.k_SGd.shape[1],
        queries_per_kv=queries,
        sms=132 if CARD else 1,
        window=params.window,
        chunk=params.chunk,
    )
    work.copy_to_device()
    return work


def paged(made: Case, params: AttentionParams, sinks_H=None) -> PagedAttentionParams:
    return PagedAttentionParams(made.page_size, params.scale, params.window, params.chunk, params.softcap, sinks_H)


def asked(made: Case, heads: int, params: AttentionParams, *, has_sinks: bool = False, **how) -> float:
    """How far decode is from the reference; nothing it must write holds a number before."""
    rows, (_, groups, width), values = len(made.lengths), made.k_SGd.shape, made.v_SGe.shape[2]
    dtype = made.k_SGd.dtype
    q_BHd, sinks = random(rows, heads, width, dtype=dtype), random(heads, dtype=dtype) if has_sinks else None
    work = cut(made, heads // groups, params, **how)
    for held in work.get_partials(heads, values):
        held.fill_(torch.nan)
    read = (q_BHd, made.k_SGd, made.v_SGe, made.block_table_SP, made.req_slots_B)
    out = poisoned(rows, heads, values, dtype=dtype)
    decode_attention(*read, work, paged(made, params, sinks), out=out)
    lengths = torch.from_numpy(made.lengths).to(DEVICE)
    return apart(out, decode_reference(*read, lengths, paged(made, params, sinks)))


@pytest.mark.parametrize("way", WAYS)
def test_single_tokens_of_any_length_see_what_they_may(way):
    made = case([100, 40, 0, 600, 1, 16], page_size=16)
    assert asked(made, 4, WAYS[way], has_sinks=way == "a window") < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["all", "a window"])
def test_neighbours_read_what_they_share_together(dtype, way):
    made = case([700, 680, 650, 0, 300, 90, 77], [(0, 3, 592), (4, 6, 80)], heads=1, dtype=dtype)
    if way == "all":
        assert cut(made, 3, WAYS[way]).host_arrays().counts[0] == 3
    assert asked(made, 3, WAYS[way], has_sinks=True) < ROUNDING[dtype]


def test_where_room_is_short_the_first_chunks_of_a_row_are_one_item():
    made = case([2200, 3, 900], [(0, 3, 0)], heads=1, width=16, page_size=4)
    plenty, scarce = cut(made, 1, WAYS["all"]), cut(made, 1, WAYS["all"], items=10)
    assert plenty.host_arrays().counts.tolist() == [0, 8] and len(scarce.host_arrays().items_I) <= 10
    assert asked(made, 1, WAYS["all"], items=10) < 1e-5
    least = cut(case([2200, 3000, 900, 3], heads=1, width=16, page_size=4), 1, WAYS["all"], items=12)
    assert int(least.host_arrays().counts.sum()) <= 12


def test_a_step_that_only_grew_is_cut_as_before():
    made = case([100, 600], heads=1, width=16)
    work = cut(made, 1, WAYS["all"])
    grown = Case(made.lengths + 5, made.group, made.shared, *(getattr(made, n) for n in Case.__slots__[3:]))
    ones = {"kv_heads": 1, "queries_per_kv": 1, "sms": 1}
    work.fill(grown.lengths, grown.group, grown.shared, **ones)
    fresh = BatchInvariantSplitKVPlan(4, 64, DEVICE)
    fresh.fill(grown.lengths, grown.group, grown.shared, **ones)
    old, new = (sorted(map(tuple, each.host_arrays().items_I.tolist())) for each in (work, fresh))
    assert old == new and work.host_arrays().length_B.tolist() == fresh.host_arrays().length_B.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_several_new_tokens_see_what_they_may(way):
    made = case([130, 600, 70], heads=1, width=24, values=16, page_size=16)
    starts, counts = np.array([100, 530, 0]), np.array([30, 70, 70])
    seats = made.req_slots_B.cpu().numpy()
    tiles = torch.from_numpy(build_prefill_tiles(starts, counts, seats, 0)).to(DEVICE)
    read = (random(170, 2, 24), made.k_SGd, made.v_SGe, made.block_table_SP, tiles)
    sinks = random(2)
    out = prefill_attention(*read, paged(made, WAYS[way], sinks))
    assert apart(out, prefill_reference(*read, paged(made, WAYS[way], sinks))) < 1e-5


@pytest.mark.parametrize("way", ["all", "a window"])
def test_a_step_of_singles_and_prompts_is_what_plain_torch_makes_of_it(way):
    params, size, width = WAYS[way], 8, 16
    starts, counts = np.array([530, 529, 3, 20]), np.array([1, 1, 1, 9])
    pages = np.random.default_rng(0).permutation(300)[: 4 * 70].reshape(4, 70)
    pages[1, :66] = pages[0, :66]
    q, k, v = random(12, 4, width), random(12, 2, width), random(12, 2, width)
    outs = []
    for card in (True, False):
        device = DEVICE if card else torch.device("cpu")
        cache = PagedKVCache([KvShape(2, width, width)], pages=300, page_size=size, device=device, dtype=torch.float32)
        held = cache.layers[0]
        assert held.values is not None
        for tensor, seed in ((held.keys, 1), (held.values, 2)):
            tensor.pages.copy_(random(300, size * 2 * width, seed=seed))
        if not card:
            attend = BatchInvariantPagedBackend(cache, starts, counts, pages, size)
            outs.append(attend(0, AttentionInputs(q.cpu(), k.cpu(), v.cpu(), params)))
            continue
        shapes = {DecodeShape(2, 2, params.window, params.chunk): 64}
        works = BatchInvariantSplitKVPlans(shapes, max_rows=4, device=device, sms=132 if CARD else 1)
        trunks = works.fill(starts[:3] + 1, np.array([0, 0, 1]), np.array([528, 528, 0]))
        assert trunks
        positions = np.concatenate((starts[:3], 20 + np.arange(9)))
        rows = np.concatenate((np.arange(3), np.full(9, 3)))
        step = StepMetadata(
            slots_T=torch.from_numpy(pages[rows, positions // size] * size + positions % size).to(device),
            block_table_BM=torch.from_numpy(pages.astype(np.int32)).to(device),
            req_slots_B=torch.arange(4, dtype=torch.int32, device=device),
            num_decodes=3,
            plans=works,
            has_prefixes=trunks,
            prefill_tiles=torch.from_numpy(build_prefill_tiles(starts[3:], counts[3:], np.array([3]), 3)).to(device),
            page_size=size,
        )
        outs.append(BatchInvariantTritonBackend(cache, step)(0, AttentionInputs(q, k, v, params)))
    assert apart(outs[0].cpu(), outs[1]) < 1e-5


@pytest.mark.parametrize("exactly", [True, False])
def test_only_in_fast_arithmetic_a_row_that_is_alone_takes_one_launch(monkeypatch, exactly):
    launched = []
    monkeypatch.setattr(decode_bs1, "decode_bs1_attention", lambda qkv, *rest: launched.append(qkv) or qkv[:, :64])
    size, width, at = 8, 16, torch.tensor([29], device=DEVICE)
    cache = PagedKVCache([KvShape(2, width, width)], pages=9, page_size=size, device=DEVICE, dtype=torch.float32)
    works = (BatchInvariantSplitKVPlans if exactly else SplitKVPlans)(
        {DecodeShape(2, 2): 64}, max_rows=1, device=DEVICE, sms=4
    )
    works.fill(np.array([30]), np.array([0]), np.array([0]))
    pages, slot = torch.arange(9, dtype=torch.int32, device=DEVICE)[None], torch.zeros_like(at)
    where = {"slots_T": at, "block_table_BM": pages, "req_slots_B": slot, "plans": works, "page_size": size}
    step = StepMetadata(**where, num_decodes=1, has_prefixes=False, prefill_tiles=None)
    turned = {"rotation": None, "positions_T": at, "interleaved": False, "q_weight_d": None, "k_weight_d": None}
    heads = QKNormRopeParams(heads=4, kv_heads=2, head_dim=width, eps=1e-6, offset=0.0, **turned)
    qkv = random(1, 8 * width)
    out = (BatchInvariantTritonBackend if exactly else TritonAttentionBackend)(cache, step).forward_qkv(
        0, qkv, heads, WAYS["all"]
    )
    assert len(launched) == (0 if exactly else 1) and out.shape == (1, 64)
    if exactly:
        q, k, v = qkv.view(1, 8, width).cpu().split((4, 2, 2), dim=1)
        on_cpu = PagedKVCache(
            [KvShape(2, width, width)], pages=9, page_size=size, device=torch.device("cpu"), dtype=torch.float32
        )
        plain = BatchInvariantPagedBackend(on_cpu, np.array([29]), np.array([1]), np.arange(9)[None], size)
        assert apart(out.cpu(), plain(0, AttentionInputs(q, k, v, WAYS["all"])).flatten(1)) < 1e-5


# Spans whose queries are all of a sequence, the end of one, and a single token.
SPANS = AttentionSpans(np.array([0, 50, 110]), np.array([50, 60, 1]), np.array([0, 50, 650]), np.array([50, 600, 1]))


# The interpreter is slow: every way in one type and every type in two ways each day, the rest among the slow tests.
PASSES = [
    pytest.param(way, dtype, marks=() if CARD or dtype == DTYPES[0] or way in ("all", "chunks") else pytest.mark.slow)
    for way in WAYS
    for dtype in DTYPES
]


@pytest.mark.parametrize(("way", "dtype"), PASSES)
def test_a_trainers_pass_and_its_gradients_are_those_of_the_formula(way, dtype):
    shapes = (111, 2, 24), (651, 1, 24), (651, 1, 16), (111, 2, 16)
    q, k, v, grad = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    sinks, params = random(2, dtype=dtype, seed=9), WAYS[way]
    wide = [x.double().cpu() for x in (q, k, v)]
    wanted, sums = reference_attention(*wide, SPANS, params, sinks.double().cpu())
    out, lse = launch_forward(q, k, v, SpanBatch(SPANS), params, sinks)
    assert apart(out.cpu(), wanted) < ROUNDING[dtype] and apart(lse.cpu(), sums) < ROUNDING[dtype]
    back = reference_attention_backward(grad.double().cpu(), (*wide, wanted, sums), SPANS, params)
    found = launch_backward(grad, (q, k, v, out, lse), SpanBatch(SPANS), params)
    assert all(apart(mine.cpu(), theirs) < 3 * ROUNDING[dtype] for mine, theirs in zip(found, back, strict=True))


@pytest.mark.skipif(not CARD, reason="needs an accelerator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("heads", "groups", "width", "values"), [(4, 2, 128, 128), (3, 1, 80, 80), (2, 2, 192, 128)])
def test_decode_prefill_and_training_agree_to_the_last_bit(dtype, way, heads, groups, width, values):
    made = case([1300, 700, 65], [(0, 2, 640)], heads=groups, width=width, values=values, dtype=dtype)
    q, params = random(1300, heads, width, dtype=dtype), WAYS[way]
    slots = made.block_table_SP[made.req_slots_B[0], torch.arange(1300, device=DEVICE) // 16] * 16
    rows = slots + torch.arange(1300, device=DEVICE) % 16
    k, v = made.k_SGd[rows], made.v_SGe[rows]
    whole, _ = launch_forward(q, k, v, SpanBatch(build_packed_spans([1300])), params, None)
    three = torch.stack((q[1299], q[699], q[64]))
    read = (made.k_SGd, made.v_SGe, made.block_table_SP, made.req_slots_B)
    for trunks in (True, False):
        out = decode_attention(three, *read, cut(made, heads // groups, params, trunks=trunks), paged(made, params))
        assert torch.equal(out[0], whole[1299])
    for start in (0, 511, 1000):
        tiles = build_prefill_tiles(np.array([start]), np.array([1300 - start]), made.req_slots_B[:1].cpu().numpy(), 0)
        sent = torch.from_numpy(tiles).to(DEVICE)
        out = prefill_attention(q[start:], *read[:3], sent, paged(made, params))
        assert torch.equal(out, whole[start:])
