"""Paged attention gives what attention over each whole sequence gives, written out in float64."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.kernels.attention.metadata import _split_blocks
from miles.kernels.attention.paged import (
    KvShape,
    PagedAttentionBackend,
    PagedKVCache,
    RecurrentStatePool,
    build_attention_metadata,
)
from miles.kernels.attention.params import AttentionInputs, AttentionParams, IndexerInputs

CPU = torch.device("cpu")
# Tokens a sequence has in its pages, and how many it brings.
LENGTHS = [(0, 1), (5, 1), (17, 1), (40, 1), (0, 6), (13, 6), (30, 9), (0, 33)]
SCALE = 0.4
WAYS = {
    "all": {},
    "a window": {"window": 7},
    "a window of one": {"window": 1},
    "a window nobody reaches": {"window": 400},
    "chunks": {"chunk": 8},
    "a window within chunks": {"window": 5, "chunk": 12},
    "bounded scores": {"softcap": 1.3},
    "bounded scores in a window": {"softcap": 1.3, "window": 9},
}


def by_hand(q_CHd, k_CGd, v_CGe, params, sinks_H=None, allowed_CC=None):
    """Attention of one whole sequence, one formula after the other."""
    q, k, v = (x.double() for x in (q_CHd, k_CGd, v_CGe))
    share, length = q.shape[1] // k.shape[1], len(q)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(share, 1)) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    asks, seen = torch.arange(length)[:, None], torch.arange(length)[None]
    sees = seen <= asks
    if params.window is not None:
        sees = sees & (asks - seen < params.window)
    if params.chunk is not None:
        sees = sees & (asks // params.chunk == seen // params.chunk)
    if allowed_CC is not None:
        sees = sees & allowed_CC
    weights = scores.exp().masked_fill(~sees, 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks_H is not None:
        total = total + sinks_H.double().exp()[:, None, None]
    return torch.einsum("hqk,khe->qhe", weights / total, v.repeat_interleave(share, 1))


def chosen(index: IndexerInputs) -> torch.Tensor:
    """Which tokens each token of one whole sequence may see."""
    q, k, weights = index.q_THd.double(), index.k_Td.double(), index.weights_TH.double()
    scores = (weights[:, :, None] * torch.einsum("qhd,kd->qhk", q, k).relu()).sum(1)
    allowed = torch.zeros(len(q), len(q), dtype=torch.bool)
    for asks, row in enumerate(scores):
        allowed[asks, row[: asks + 1].sort(descending=True, stable=True).indices[: index.topk]] = True
    return allowed


@dataclass
class Story:
    """Sequences some of whose tokens are in scattered pages already, and the rest of which are to come."""

    shape: KvShape
    heads: int
    page_size: int
    layers: int = 1
    lengths: list[tuple[int, int]] = field(default_factory=lambda: LENGTHS)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        kv, (starts, counts) = self.shape, (np.array(column) for column in zip(*self.lengths, strict=True))
        ends = starts + counts
        self.q = [torch.randn(n, self.heads, kv.key_dim) for n in ends]
        self.k = [torch.randn(n, kv.heads, kv.key_dim) for n in ends]
        self.v = (
            [torch.randn(n, kv.heads, kv.value_dim) for n in ends] if kv.value_dim else [k[..., :5] for k in self.k]
        )
        width, total = int(-(-ends.max() // self.page_size)), int((-(-ends // self.page_size)).sum())
        free = iter(np.random.default_rng(0).permutation(total + 9).tolist())
        pages = np.zeros((len(ends), width), np.int64)
        for row, end in enumerate(ends):
            pages[row, : -(-end // self.page_size)] = [next(free) for _ in range(-(-end // self.page_size))]
        self.cache = PagedKVCache(
            self.layers * [kv], pages=total + 9, page_size=self.page_size, device=CPU, dtype=torch.float32
        )
        self.positions, self.layout = build_attention_metadata(
            starts, counts, pages, self.page_size, device=CPU, dtype=torch.float32
        )
        self.pages = pages

    def new(self, parts):
        """The tokens to come, of all sequences."""
        return torch.cat([part[start:] for part, (start, _) in zip(parts, self.lengths, strict=True)])

    def remember(self, paged, parts):
        """Put the tokens that came before into their pages."""
        for row, (start, _) in enumerate(self.lengths):
            for position in range(start):
                slot = int(self.pages[row, position // self.page_size]) * self.page_size + position % self.page_size
                paged.slots[slot] = parts[row][position]

    def attend(self) -> PagedAttentionBackend:
        for held in self.cache.layers.values():
            self.remember(held.keys, self.k)
            if held.values is not None:
                self.remember(held.values, self.v)
        return PagedAttentionBackend(self.cache, self.layout)

    def asked(self, attend, params, layer=0, **more):
        return attend(layer, AttentionInputs(self.new(self.q), self.new(self.k), self.new(self.v), params, **more))

    def expected(self, params, sinks_H=None, allowed=None):
        parts = zip(self.q, self.k, self.v, allowed or [None] * len(self.q), strict=True)
        return self.new([by_hand(q, k, v, params, sinks_H, sees) for q, k, v, sees in parts]).float()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_new_tokens_see_exactly_their_own_sequence_in_every_layer(heads, page_size):
    story = Story(KvShape(2, 8, 8), heads, page_size, layers=2)
    assert story.positions.tolist() == [p for s, n in LENGTHS for p in range(s, s + n)]
    attend, params = story.attend(), AttentionParams(scale=SCALE)
    for layer in range(2):
        close(story.asked(attend, params, layer), story.expected(params))


@pytest.mark.parametrize("shape", [KvShape(2, 8, 8), KvShape(2, 8, 6), KvShape(1, 9, 0)], ids=["one", "two", "latent"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_looks_back_as_it_is_told(way, sinks, shape):
    story = Story(shape, 4, 4)
    params, sinks_H = AttentionParams(scale=SCALE, **WAYS[way]), torch.randn(4) if sinks else None
    close(story.asked(story.attend(), params, sinks_H=sinks_H), story.expected(params, sinks_H))


@pytest.mark.parametrize("top", [1, 6, 30, 100])
def test_an_index_chooses_who_is_seen_and_another_layer_takes_its_choice_over(top):
    story = Story(KvShape(1, 9, 0, 6), 4, 4, layers=2)
    ends = [s + n for s, n in LENGTHS]
    indices = [
        IndexerInputs(q_THd=torch.randn(n, 7, 6), k_Td=torch.randn(n, 6), weights_TH=torch.randn(n, 7), topk=top)
        for n in ends
    ]
    attend = story.attend()
    story.remember(story.cache.layers[0].index, [index.k_Td for index in indices])
    q, k, w = (story.new([getattr(index, part) for index in indices]) for part in ("q_THd", "k_Td", "weights_TH"))
    params = AttentionParams(scale=SCALE)
    expected = story.expected(params, allowed=[chosen(index) for index in indices])
    close(story.asked(attend, params, indexer=IndexerInputs(q_THd=q, k_Td=k, weights_TH=w, topk=top)), expected)
    close(story.asked(attend, params, layer=1, indexer=0), expected)


def test_layers_of_many_kinds_share_a_step():
    """Each looks back in its own way; what one lays out does not disturb the others."""
    story = Story(KvShape(2, 8, 8), 4, 4, layers=len(WAYS))
    attend = story.attend()
    for layer, way in enumerate(WAYS.values()):
        params = AttentionParams(scale=SCALE, **way)
        close(story.asked(attend, params, layer), story.expected(params))


@pytest.mark.parametrize("limit", [1, 700])
def test_scores_written_out_some_at_a_time_are_the_same(monkeypatch, limit):
    monkeypatch.setattr("miles.kernels.attention.paged._MAX_SCORES", limit)
    test_a_layer_looks_back_as_it_is_told("bounded scores in a window", True, KvShape(2, 8, 8))
    test_an_index_chooses_who_is_seen_and_another_layer_takes_its_choice_over(6)


def test_half_precision_is_written_out_in_float32():
    story = Story(KvShape(2, 8, 8), 4, 4)
    story.q, story.k, story.v = ([x.bfloat16().float() for x in parts] for parts in (story.q, story.k, story.v))
    params, sinks_H = AttentionParams(scale=SCALE, softcap=2.0, window=11), torch.randn(4)
    expected = story.expected(params, sinks_H)
    half = PagedKVCache([story.shape], pages=200, page_size=4, device=CPU, dtype=torch.bfloat16)
    starts, counts = (np.array(column) for column in zip(*LENGTHS, strict=True))
    _, story.layout = build_attention_metadata(starts, counts, story.pages, 4, device=CPU, dtype=torch.bfloat16)
    story.cache = half
    story.q, story.k, story.v = ([x.bfloat16() for x in parts] for parts in (story.q, story.k, story.v))
    ours = story.asked(story.attend(), params, sinks_H=sinks_H.bfloat16())
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - expected).abs().max() <= 2e-2


def test_a_page_may_be_copied_while_it_is_overwritten():
    cache = PagedKVCache(
        [None, KvShape(1, 1, 1), KvShape(1, 2, 0, 1)], pages=3, page_size=2, device=CPU, dtype=torch.int
    )
    assert sorted(cache.layers) == [1, 2]
    parts = [cache.layers[1].keys, cache.layers[1].values, cache.layers[2].keys, cache.layers[2].index]
    for part in parts:
        for page in range(3):
            part.pages[page] = page
    cache.copy(np.array([0, 1]), np.array([1, 2]))
    for part in parts:
        assert part.pages[:, 0].tolist() == [0, 0, 1]
        assert part.slots.flatten(1)[:, 0].tolist() == [0, 0, 0, 0, 1, 1]


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=40))
@settings(max_examples=examples(80), deadline=None)
def test_blocks_are_neighbours_that_cover_everyone_once(rows):
    queries, pages = (np.array(column) for column in zip(*rows, strict=True))
    blocks = _split_blocks(queries, pages)
    assert [row for lo, hi in blocks for row in range(lo, hi)] == list(range(len(rows)))
    assert all(lo < hi for lo, hi in blocks)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=8),
    st.sampled_from([1, 3, 4]),
    st.one_of(st.none(), st.integers(1, 70)),
    st.one_of(st.none(), st.integers(1, 70)),
)
@settings(max_examples=examples(60), deadline=None)
def test_windows_and_chunks_hold_for_any_lengths(lengths, page_size, window, chunk):
    lengths.sort(key=lambda length: length[1])
    story = Story(KvShape(1, 2, 2), 2, page_size, lengths=lengths)
    params = AttentionParams(scale=SCALE, window=window, chunk=chunk)
    close(story.asked(story.attend(), params), story.expected(params))


@pytest.mark.parametrize("shape", [KvShape(2, 8, 8), KvShape(1, 9, 0)], ids=["keys and values", "latent"])
def test_samples_of_one_prompt_share_a_trunk_and_still_see_exactly_their_own_sequence(shape):
    """The same queries over the same tokens, once with common pages and once with pages of their own."""
    torch.manual_seed(0)
    size, heads = 4, 4
    rng = np.random.default_rng(0)
    families = [(19, 7), (14, 5), (0, 4), (11, 1), (2, 2)]  # common full pages, samples
    rows: list[list[int]] = []
    starts: list[int] = []
    free = iter(rng.permutation(1000).tolist())
    for depth, samples in families:
        trunk = [next(free) for _ in range(depth)]
        for _ in range(samples):
            start = depth * size + int(rng.integers(0, 30))
            rows.append(trunk + [next(free) for _ in range(start // size + 1 - depth)])
            starts.append(start)
    pages = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, line in enumerate(rows):
        pages[row, : len(line)] = line
    own = np.arange(pages.size).reshape(pages.shape) + 1000
    cache = PagedKVCache([shape], pages=1000 + pages.size, page_size=size, device=CPU, dtype=torch.float32)
    held = cache.layers[0]
    for paged in (held.keys, held.values):
        if paged is not None:
            paged.pages[:1000] = torch.randn(1000, paged.pages.shape[1])
            paged.pages[torch.from_numpy(own.ravel())] = paged.pages[torch.from_numpy(pages.ravel())]
    q, k, v = (torch.randn(len(rows), h, shape.key_dim) for h in (heads, shape.heads, shape.heads))
    if shape.value_dim == 0:
        v = k[..., :5]
    for params in (AttentionParams(scale=SCALE), AttentionParams(scale=SCALE, window=30)):
        results = []
        for table in (pages, own):
            ones = np.ones(len(rows), np.int64)
            _, layout = build_attention_metadata(np.array(starts), ones, table, size, device=CPU, dtype=torch.float32)
            results.append(
                (layout.full_blocks, PagedAttentionBackend(cache, layout)(0, AttentionInputs(q, k, v, params)))
            )
        assert [len(blocks.prefix) > 0 for blocks, _ in results] == [True, False]
        assert results[0][0].prefix_tokens is not None
        assert len(results[0][0].prefix_tokens) == 14  # families of one, and those with no page in common, have none
        close(results[0][1], results[1][1])


# -- states ---------------------------------------------------------------------------------


def states() -> RecurrentStatePool:
    made = RecurrentStatePool({3: [((2,), torch.float32), ((1, 2), torch.bfloat16)]}, slots=5, device=CPU)
    for tensor in made.layers[3]:
        tensor.copy_(torch.arange(5).view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor) + 1)
    return made


def test_a_sequence_finds_the_state_of_its_slot_and_nothing_when_it_begins():
    cache = PagedKVCache([None], pages=1, page_size=4, device=CPU, dtype=torch.float32)
    starts, counts = np.array([7, 0, 3]), np.array([1, 1, 4])
    _, layout = build_attention_metadata(starts, counts, np.zeros((3, 2), np.int64), 4, device=CPU, dtype=torch.float32)
    made = states()
    carry = PagedAttentionBackend(cache, layout, made.select(np.array([4, 1, 0]), starts, counts)).recurrent_state(3)
    assert carry.lengths == [1, 1, 4]
    assert carry.state is not None
    assert [rows.flatten(1)[:, 0].tolist() for rows in carry.state] == [[5, 0, 1], [5, 0, 1]]
    carry.update(tuple(rows.float() + 10 for rows in carry.state))
    for held, dtype in zip(made.layers[3], (torch.float32, torch.bfloat16), strict=True):
        assert held.dtype == dtype
        assert held.flatten(1)[:, 0].tolist() == [11, 10, 3, 4, 15]


def test_a_slot_may_be_copied_while_it_is_overwritten():
    made = states()
    made.copy(np.array([0, 1, 1]), np.array([1, 2, 4]))
    for held in made.layers[3]:
        assert held.flatten(1)[:, 0].tolist() == [1, 1, 2, 4, 2]
