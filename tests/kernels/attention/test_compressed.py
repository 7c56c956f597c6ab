"""Compressed attention against its definition token by token: keys of windows, the selection, gradients, and pages."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples
from torch import Tensor

from miles.kernels.attention import compressed, compressed_paged
from miles.kernels.attention.compressed import (
    CompressedAttentionBackend,
    CompressorInputs,
    WindowIndexerInputs,
    compressed_attention,
    list_windows,
    pool_windows,
)
from miles.kernels.attention.paged import KvShape, PagedAttentionBackend, PagedKVCache, build_attention_metadata
from miles.kernels.attention.params import AttentionInputs, AttentionParams
from miles.kernels.attention.tree import Segment, TreeAttentionBackend
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.batch_invariant.packed_attention import BatchInvariantTreeBackend, BatchInvariantVarlenBackend
from miles.kernels.batch_invariant.paged_attention import BatchInvariantPagedBackend
from miles.kernels.numerics import BATCH_INVARIANT, FAST, Numerics

HEADS, SIZE, INDEX_HEADS, INDEX_SIZE = 3, 6, 16, 4
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def window_key(states: Tensor, number: int, bias: Tensor, overlap: bool) -> Tensor:
    """The key of one window of a sequence, written out."""
    rate, channels = bias.shape
    width = channels // 2 if overlap else channels
    values, gates = [], []
    for place in range(rate):
        own = number * rate + place
        if overlap and number > 0:
            values.append(states[own - rate, :width])
            gates.append(states[own - rate, channels : channels + width] + bias[place, :width])
        values.append(states[own, channels - width : channels])
        gates.append(states[own, 2 * channels - width :] + bias[place, channels - width :])
    return (torch.stack(gates).softmax(0) * torch.stack(values)).sum(0)


class Layer:
    """The inputs of one layer for a sequence, and what its attention is by definition."""

    def __init__(
        self,
        length: int,
        *,
        rate: int,
        overlap: bool,
        window: int,
        topk: int | None,
        seed: int = 0,
        numerics: Numerics = FAST,
    ) -> None:
        self.numerics = numerics
        self.length, self.rate, self.overlap, self.window, self.topk = length, rate, overlap, window, topk
        reads = 2 if overlap else 1
        self.bias, self.index_bias = random(rate, reads * SIZE, seed=1), random(rate, reads * INDEX_SIZE, seed=2)
        width = 2 * reads * (SIZE + (0 if topk is None else INDEX_SIZE))
        self.q, self.k = random(length, HEADS, SIZE, seed=seed + 3), random(length, 1, SIZE, seed=seed + 4)
        self.states, self.sinks = random(length, width, seed=seed + 5), random(HEADS, seed=6)
        self.index_q = random(length, INDEX_HEADS, INDEX_SIZE, seed=seed + 7)
        self.weights = random(length, INDEX_HEADS, seed=seed + 8)
        self.params = AttentionParams(scale=0.5, window=window)

    def inputs(self, rows: slice = slice(None)) -> tuple[AttentionInputs, CompressorInputs]:
        split = 2 * self.bias.shape[1]

        def compress(states: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor | None]:
            keys = pool_windows(states[..., :split], numbers, self.bias, self.overlap, self.numerics)
            if self.topk is None:
                return keys, None
            return keys, pool_windows(states[..., split:], numbers, self.index_bias, self.overlap, self.numerics)

        index = None
        if self.topk is not None:
            index = WindowIndexerInputs(self.index_q[rows], self.weights[rows], self.topk)
        return AttentionInputs(self.q[rows], self.k[rows], self.k[rows], self.params, self.sinks), CompressorInputs(
            states_Tx=self.states[rows],
            rate=self.rate,
            overlap=self.overlap,
            compress=compress,
            key_start=self.bias.shape[1] - SIZE,
            index_start=split + self.index_bias.shape[1] - INDEX_SIZE,
            indexer=index,
        )

    def by_definition(self) -> Tensor:
        """Token by token."""
        split = 2 * self.bias.shape[1]
        numbers = range(self.length // self.rate)
        keys = [window_key(self.states[:, :split], n, self.bias, self.overlap) for n in numbers]
        outs = []
        for token in range(self.length):
            complete = list(range((token + 1) // self.rate))
            if self.topk is not None:
                own = [window_key(self.states[:, split:], n, self.index_bias, self.overlap) for n in complete]
                scores = [float((self.weights[token] * (self.index_q[token] @ key).relu()).sum()) for key in own]
                complete = sorted(complete, key=lambda n: -scores[n])[: self.topk]
            seen = [*self.k[max(0, token - self.window + 1) : token + 1, 0], *(keys[n] for n in complete)]
            matrix = torch.stack(seen)
            scores = torch.cat((self.q[token] @ matrix.T * self.params.scale, self.sinks[:, None]), 1)
            outs.append(scores.softmax(-1)[:, :-1] @ matrix)
        return torch.stack(outs)


SHAPES = [
    {"rate": 3, "overlap": True, "window": 5, "topk": 2},
    {"rate": 4, "overlap": False, "window": 3, "topk": None},
    {"rate": 2, "overlap": True, "window": 1, "topk": 40},
    {"rate": 30, "overlap": False, "window": 8, "topk": None},
]


def join(parts: list[tuple[AttentionInputs, CompressorInputs]]) -> tuple[AttentionInputs, CompressorInputs]:
    """Tokens of several sequences in one call."""
    inputs, first = parts[0]
    q, k, v = (torch.cat([own[n] for own, _ in parts]) for n in range(3))
    index = first.indexer
    if index is not None:
        q_index, weights = (torch.cat([own.indexer[n] for _, own in parts if own.indexer]) for n in (0, 1))
        index = index._replace(q_Thi=q_index, weights_Th=weights)
    states = torch.cat([own.states_Tx for _, own in parts])
    return inputs._replace(q_THd=q, k_TGd=k, v_TGe=v), replace(first, states_Tx=states, indexer=index)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_a_packed_batch_attends_as_defined_in_any_number_of_slices(shape, at_once, monkeypatch):
    monkeypatch.setattr(compressed, "max_scores_at_once", lambda _: at_once)
    layers = [Layer(length, **shape, seed=10 * length) for length in (23, 1, 8, 32)]
    backend = VarlenAttentionBackend([layer.length for layer in layers], CPU)
    out = backend.attend_compressed(0, *join([layer.inputs() for layer in layers]))
    wanted = torch.cat([layer.by_definition() for layer in layers])
    assert torch.allclose(out, wanted, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_finite_differences():
    q, k, keys, sinks = (x.requires_grad_() for x in (random(9, 2, 4), random(9, 4), random(4, 4), random(2)))
    selected = torch.tensor([[3, 1], [0, 2], [1, 0], [0, 3], [1, 0], [0, 1], [1, 2], [2, 0], [3, 1]])
    options = {"scale": 0.5, "window": 3, "rate": 2}
    for chosen in (None, selected):
        assert torch.autograd.gradcheck(
            lambda *x, chosen=chosen: compressed_attention(*x[:3], sinks_H=x[3], selected_Sk=chosen, **options),
            (q, k, keys, sinks),
        )


def test_a_sequence_without_a_complete_window_gives_the_compressor_gradients_of_zero():
    layer = Layer(3, rate=4, overlap=True, window=2, topk=None)
    states, bias = layer.states.requires_grad_(), layer.bias.requires_grad_()
    inputs, own = layer.inputs()
    VarlenAttentionBackend([3], CPU).attend_compressed(0, inputs, own).sum().backward()
    assert states.grad is not None and bias.grad is not None
    assert not states.grad.any() and not bias.grad.any()


def attend_in_pieces(layers: list[Layer], page_size: int, rng: np.random.Generator) -> list[Tensor]:
    """Every sequence in pages, some tokens at a time."""
    shape = KvShape(heads=1, key_dim=SIZE, value_dim=0, index_dim=layers[0].states.shape[1])
    pages = 50 * len(layers)
    cache = PagedKVCache([shape], pages=pages, page_size=page_size, device=CPU, dtype=torch.float64)
    tables = rng.permutation(pages).reshape(len(layers), -1)
    done, outs = np.zeros(len(layers), np.int64), [list[Tensor]() for _ in layers]
    lengths = np.array([layer.length for layer in layers])
    while (done < lengths).any():
        counts = np.minimum(rng.choice([0, 1, 1, 6], len(layers)), lengths - done)
        rows = [i for i in np.argsort(counts) if counts[i]]
        if not rows:
            continue
        parts = [layers[i].inputs(slice(done[i], done[i] + counts[i])) for i in rows]
        where = (done[rows], counts[rows], tables[rows], page_size)
        if layers[0].numerics.batch_invariant:
            backend = BatchInvariantPagedBackend(cache, *where)
        else:
            backend = PagedAttentionBackend(cache, build_attention_metadata(*where, device=CPU, dtype=torch.float64)[1])
        out = backend.attend_compressed(0, *join(parts))
        for i, each in zip(rows, out.split(counts[rows].tolist()), strict=True):
            outs[i].append(each)
        done += counts
    return [torch.cat(each) for each in outs]


@settings(max_examples=examples(30), deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 4, 7]),
    at_once=st.sampled_from([1, 1 << 20]),
    seed=st.integers(0, 5),
)
def test_pages_filled_in_any_pieces_hold_what_later_tokens_attend_to(shape, lengths, page_size, at_once, seed):
    layers = [Layer(length, **shape, seed=100 * i) for i, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed_paged, "_MAX_SCORES", at_once)
        outs = attend_in_pieces(layers, page_size, np.random.default_rng(seed))
    for layer, out in zip(layers, outs, strict=True):
        assert torch.allclose(out, layer.by_definition(), rtol=1e-9, atol=1e-9)


def test_windows_are_listed_once_whatever_pieces_complete_them():
    whole = list_windows(np.array([0]), np.array([17]), 4, 8)
    pieces = [list_windows(np.array([a]), np.array([b]), 4, 8) for a, b in ((0, 3), (3, 4), (4, 13), (13, 17))]
    for i in (1, 2):
        assert np.array_equal(np.concatenate([each[i] for each in pieces]), whole[i])
    assert whole[2].tolist()[1] == list(range(8)) and whole[2].tolist()[0] == [0, 0, 0, 0, 0, 1, 2, 3]


def test_every_backend_that_models_are_trained_with_attends_to_compressed_keys():
    for backend in (
        VarlenAttentionBackend,
        TreeAttentionBackend,
        BatchInvariantVarlenBackend,
        BatchInvariantTreeBackend,
    ):
        assert issubclass(backend, CompressedAttentionBackend)


@pytest.mark.parametrize("backend_class", [TreeAttentionBackend, BatchInvariantTreeBackend])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_segments_of_sequences_attend_as_the_whole_sequences_do(shape, backend_class):
    """Keys and states of all tokens are in another order, as context ranks gather them."""
    layers = [Layer(length, **shape, seed=10 * length) for length in (23, 32)]
    inputs, own = join([layer.inputs() for layer in layers])
    order = torch.randperm(55, generator=torch.Generator().manual_seed(3))
    rows = order.argsort().tolist()
    cuts = [(0, 0, 9), (0, 9, 23), (23, 0, 1), (23, 1, 32)]
    segments = [Segment(stop - start, tuple((rows[first + i], 1) for i in range(stop))) for first, start, stop in cuts]
    tensors = [inputs.q_THd, inputs.k_TGd[order], own.states_Tx[order]]
    q, k, states = (x.clone().requires_grad_() for x in tensors)
    backend = backend_class(segments, CPU, keys=55)
    out = backend.attend_compressed(0, inputs._replace(q_THd=q, k_TGd=k, v_TGe=k), replace(own, states_Tx=states))
    wanted = torch.cat([layer.by_definition() for layer in layers])
    assert torch.allclose(out, wanted, rtol=1e-9, atol=1e-9)
    out.sin().sum().backward()
    whole = [x.clone().requires_grad_() for x in (inputs.q_THd, inputs.k_TGd, own.states_Tx)]
    packed = VarlenAttentionBackend([23, 32], CPU)
    given = inputs._replace(q_THd=whole[0], k_TGd=whole[1], v_TGe=whole[1])
    packed.attend_compressed(0, given, replace(own, states_Tx=whole[2])).sin().sum().backward()
    for mine, theirs, place in zip((q, k, states), whole, (None, order, order), strict=True):
        grad = theirs.grad if place is None else theirs.grad[place]
        assert torch.allclose(mine.grad, grad, rtol=1e-9, atol=1e-9)


@settings(max_examples=examples(20), deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 4, 7]),
    seed=st.integers(0, 5),
)
def test_batch_invariant_pages_and_packed_sequences_are_the_same_bits(shape, lengths, page_size, seed):
    layers = [Layer(length, **shape, seed=100 * i, numerics=BATCH_INVARIANT) for i, length in enumerate(lengths)]
    outs = attend_in_pieces(layers, page_size, np.random.default_rng(seed))
    packed = BatchInvariantVarlenBackend(lengths, CPU)
    whole = packed.attend_compressed(0, *join([layer.inputs() for layer in layers])).split(lengths)
    for layer, out, same in zip(layers, outs, whole, strict=True):
        assert torch.equal(out, same)
        assert torch.allclose(out, layer.by_definition(), rtol=1e-9, atol=1e-9)
