"""Device code of exact attention: right by the formula, and on a card the same bits in every form."""

import numpy as np
import pytest
import tests.kernels.interpreter  # noqa: F401  (loops in the interpreter)
import torch
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.kernels.paged_case import Case, case, poisoned

from miles.kernels import alone
from miles.kernels.cache import KvShape, PagedCache
from miles.kernels.card import CardAttend, Shape, Step, Works
from miles.kernels.decode import decode_reference
from miles.kernels.exact.attention import Asked
from miles.kernels.exact.attention_backward import train_backward
from miles.kernels.exact.attention_paged import decode_attention, prefill_attention
from miles.kernels.exact.attention_plain import plain_attention, plain_backward
from miles.kernels.exact.attention_spans import Spans, packed_spans
from miles.kernels.exact.attention_train import train_attention
from miles.kernels.exact.attention_work import ChunkWork
from miles.kernels.exact.paged import ExactCardAttend, ExactPagedAttend, ExactWorks
from miles.kernels.prefill import prefill_reference, prefill_tiles
from miles.kernels.prepare import Heads
from miles.kernels.terms import Terms

pytestmark = needs_triton

WAYS = {
    "all": Terms(scale=0.3),
    "a window": Terms(scale=0.3, window=70),
    "a window of one": Terms(scale=0.3, window=1),
    "chunks": Terms(scale=0.3, chunk=90),
    "bounded scores": Terms(scale=0.3, softcap=2.0),
}


def cut(made: Case, queries: int, terms: Terms, *, trunks: bool = True, items: int = 64) -> ChunkWork:
    work = ChunkWork(len(made.lengths) + 2, items, DEVICE)
    shared = made.shared if trunks else np.zeros_like(made.shared)
    work.fill(
        *(made.lengths, made.group, shared),
        kv_heads=made.k_SGd.shape[1],
        queries_per_kv=queries,
        sms=132 if CARD else 1,
        window=terms.window,
        chunk=terms.chunk,
    )
    work.send()
    return work


def look(made: Case, terms: Terms) -> dict:
    reach = {"window": terms.window, "chunk": terms.chunk, "softcap": terms.softcap}
    return {"page_size": made.page_size, "scale": terms.scale, **reach}


def asked(made: Case, heads: int, terms: Terms, *, sunk: bool = False, **how) -> float:
    """How far decode is from the reference; nothing it must write holds a number before."""
    rows, (_, groups, width), values = len(made.lengths), made.k_SGd.shape, made.v_SGe.shape[2]
    dtype = made.k_SGd.dtype
    q_BHd, sinks = random(rows, heads, width, dtype=dtype), random(heads, dtype=dtype) if sunk else None
    work = cut(made, heads // groups, terms, **how)
    for held in work.parts(heads, values):
        held.fill_(torch.nan)
    read = (q_BHd, made.k_SGd, made.v_SGe, made.pages_SP, made.seats_B)
    out = poisoned(rows, heads, values, dtype=dtype)
    decode_attention(*read, work, terms, page_size=made.page_size, sinks_H=sinks, out=out)
    lengths = torch.from_numpy(made.lengths).to(DEVICE)
    return apart(out, decode_reference(*read, lengths, **look(made, terms), sinks_H=sinks))


@pytest.mark.parametrize("way", WAYS)
def test_single_tokens_of_any_length_see_what_they_may(way):
    made = case([100, 40, 0, 600, 1, 16], page_size=16)
    assert asked(made, 4, WAYS[way], sunk=way == "a window") < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["all", "a window"])
def test_neighbours_read_what_they_share_together(dtype, way):
    made = case([700, 680, 650, 0, 300, 90, 77], [(0, 3, 592), (4, 6, 80)], heads=1, dtype=dtype)
    if way == "all":
        assert cut(made, 3, WAYS[way]).lists().counts[0] == 3
    assert asked(made, 3, WAYS[way], sunk=True) < ROUNDING[dtype]


def test_where_room_is_short_the_first_chunks_of_a_row_are_one_item():
    made = case([2200, 3, 900], [(0, 3, 0)], heads=1, width=16, page_size=4)
    plenty, scarce = cut(made, 1, WAYS["all"]), cut(made, 1, WAYS["all"], items=10)
    assert plenty.lists().counts.tolist() == [0, 8] and len(scarce.lists().items_I) <= 10
    assert asked(made, 1, WAYS["all"], items=10) < 1e-5
    least = cut(case([2200, 3000, 900, 3], heads=1, width=16, page_size=4), 1, WAYS["all"], items=12)
    assert int(least.lists().counts.sum()) <= 12


def test_a_step_that_only_grew_is_cut_as_before():
    made = case([100, 600], heads=1, width=16)
    work = cut(made, 1, WAYS["all"])
    grown = Case(made.lengths + 5, made.group, made.shared, *(getattr(made, n) for n in Case.__slots__[3:]))
    ones = {"kv_heads": 1, "queries_per_kv": 1, "sms": 1}
    work.fill(grown.lengths, grown.group, grown.shared, **ones)
    fresh = ChunkWork(4, 64, DEVICE)
    fresh.fill(grown.lengths, grown.group, grown.shared, **ones)
    old, new = (sorted(map(tuple, each.lists().items_I.tolist())) for each in (work, fresh))
    assert old == new and work.lists().length_B.tolist() == fresh.lists().length_B.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_several_new_tokens_see_what_they_may(way):
    made = case([130, 600, 70], heads=1, width=24, values=16, page_size=16)
    starts, counts = np.array([100, 530, 0]), np.array([30, 70, 70])
    seats = made.seats_B.cpu().numpy()
    tiles = torch.from_numpy(prefill_tiles(starts, counts, seats, 0)).to(DEVICE)
    read = (random(170, 2, 24), made.k_SGd, made.v_SGe, made.pages_SP, tiles)
    sinks = random(2)
    out = prefill_attention(*read, WAYS[way], page_size=16, sinks_H=sinks)
    assert apart(out, prefill_reference(*read, **look(made, WAYS[way]), sinks_H=sinks)) < 1e-5


@pytest.mark.parametrize("way", ["all", "a window"])
def test_a_step_of_singles_and_prompts_is_what_plain_torch_makes_of_it(way):
    terms, size, width = WAYS[way], 8, 16
    starts, counts = np.array([530, 529, 3, 20]), np.array([1, 1, 1, 9])
    pages = np.random.default_rng(0).permutation(300)[: 4 * 70].reshape(4, 70)
    pages[1, :66] = pages[0, :66]
    q, k, v = random(12, 4, width), random(12, 2, width), random(12, 2, width)
    outs = []
    for card in (True, False):
        device = DEVICE if card else torch.device("cpu")
        cache = PagedCache([KvShape(2, width, width)], pages=300, page_size=size, device=device, dtype=torch.float32)
        held = cache.layers[0]
        assert held.values is not None
        for paged, seed in ((held.keys, 1), (held.values, 2)):
            paged.pages.copy_(random(300, size * 2 * width, seed=seed))
        if not card:
            attend = ExactPagedAttend(cache, starts, counts, pages, size)
            outs.append(attend(0, q.cpu(), k.cpu(), v.cpu(), terms))
            continue
        shapes = {Shape(2, 2, terms.window, terms.chunk): 64}
        works = ExactWorks(shapes, max_rows=4, device=device, sms=132 if CARD else 1)
        trunks = works.send(starts[:3] + 1, np.array([0, 0, 1]), np.array([528, 528, 0]))
        assert trunks
        positions = np.concatenate((starts[:3], 20 + np.arange(9)))
        rows = np.concatenate((np.arange(3), np.full(9, 3)))
        step = Step(
            slots_T=torch.from_numpy(pages[rows, positions // size] * size + positions % size).to(device),
            pages_BM=torch.from_numpy(pages.astype(np.int32)).to(device),
            rows_B=torch.arange(4, dtype=torch.int32, device=device),
            singles=3,
            works=works,
            trunks=trunks,
            tiles=torch.from_numpy(prefill_tiles(starts[3:], counts[3:], np.array([3]), 3)).to(device),
            page_size=size,
        )
        outs.append(ExactCardAttend(cache, step)(0, q, k, v, terms))
    assert apart(outs[0].cpu(), outs[1]) < 1e-5


@pytest.mark.parametrize("exactly", [True, False])
def test_only_in_fast_arithmetic_a_row_that_is_alone_takes_one_launch(monkeypatch, exactly):
    launched = []
    monkeypatch.setattr(alone, "attend_one", lambda qkv, *rest: launched.append(qkv) or qkv[:, :64])
    size, width, at = 8, 16, torch.tensor([29], device=DEVICE)
    cache = PagedCache([KvShape(2, width, width)], pages=9, page_size=size, device=DEVICE, dtype=torch.float32)
    works = (ExactWorks if exactly else Works)({Shape(2, 2): 64}, max_rows=1, device=DEVICE, sms=4)
    works.send(np.array([30]), np.array([0]), np.array([0]))
    pages, seat = torch.arange(9, dtype=torch.int32, device=DEVICE)[None], torch.zeros_like(at)
    where = {"slots_T": at, "pages_BM": pages, "rows_B": seat, "works": works, "page_size": size}
    step = Step(**where, singles=1, trunks=False, tiles=None)
    turned = {"rotation": None, "positions_T": at, "interleaved": False, "q_weight_d": None, "k_weight_d": None}
    heads = Heads(heads=4, kv_heads=2, head_dim=width, eps=1e-6, offset=0.0, **turned)
    qkv = random(1, 8 * width)
    out = (ExactCardAttend if exactly else CardAttend)(cache, step).straight(0, qkv, heads, WAYS["all"])
    assert len(launched) == (0 if exactly else 1) and out.shape == (1, 64)
    if exactly:
        q, k, v = qkv.view(1, 8, width).cpu().split((4, 2, 2), dim=1)
        on_cpu = PagedCache(
            [KvShape(2, width, width)], pages=9, page_size=size, device=torch.device("cpu"), dtype=torch.float32
        )
        plain = ExactPagedAttend(on_cpu, np.array([29]), np.array([1]), np.arange(9)[None], size)
        assert apart(out.cpu(), plain(0, q, k, v, WAYS["all"]).flatten(1)) < 1e-5


# Spans whose queries are all of a sequence, the end of one, and a single token.
SPANS = Spans(np.array([0, 50, 110]), np.array([50, 60, 1]), np.array([0, 50, 650]), np.array([50, 600, 1]))


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
    sinks, terms = random(2, dtype=dtype, seed=9), WAYS[way]
    wide = [x.double().cpu() for x in (q, k, v)]
    wanted, sums = plain_attention(*wide, SPANS, terms, sinks.double().cpu())
    out, lse = train_attention(q, k, v, Asked(SPANS), terms, sinks)
    assert apart(out.cpu(), wanted) < ROUNDING[dtype] and apart(lse.cpu(), sums) < ROUNDING[dtype]
    back = plain_backward(grad.double().cpu(), (*wide, wanted, sums), SPANS, terms)
    found = train_backward(grad, (q, k, v, out, lse), Asked(SPANS), terms)
    assert all(apart(mine.cpu(), theirs) < 3 * ROUNDING[dtype] for mine, theirs in zip(found, back, strict=True))


@pytest.mark.skipif(not CARD, reason="needs an accelerator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("heads", "groups", "width", "values"), [(4, 2, 128, 128), (3, 1, 80, 80), (2, 2, 192, 128)])
def test_decode_prefill_and_training_agree_to_the_last_bit(dtype, way, heads, groups, width, values):
    made = case([1300, 700, 65], [(0, 2, 640)], heads=groups, width=width, values=values, dtype=dtype)
    q, terms = random(1300, heads, width, dtype=dtype), WAYS[way]
    slots = made.pages_SP[made.seats_B[0], torch.arange(1300, device=DEVICE) // 16] * 16
    rows = slots + torch.arange(1300, device=DEVICE) % 16
    k, v = made.k_SGd[rows], made.v_SGe[rows]
    whole, _ = train_attention(q, k, v, Asked(packed_spans([1300])), terms, None)
    three = torch.stack((q[1299], q[699], q[64]))
    read = (made.k_SGd, made.v_SGe, made.pages_SP, made.seats_B)
    for trunks in (True, False):
        out = decode_attention(three, *read, cut(made, heads // groups, terms, trunks=trunks), terms, page_size=16)
        assert torch.equal(out[0], whole[1299])
    for start in (0, 511, 1000):
        tiles = prefill_tiles(np.array([start]), np.array([1300 - start]), made.seats_B[:1].cpu().numpy(), 0)
        sent = torch.from_numpy(tiles).to(DEVICE)
        out = prefill_attention(q[start:], *read[:3], sent, terms, page_size=16)
        assert torch.equal(out, whole[start:])
