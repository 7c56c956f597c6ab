"""Attention with a relative position bias against its definition: gradients, windows, slices, and pages."""

import numpy as np
import pytest
import torch
from torch import Tensor

from miles.kernels.attention import eager, relative
from miles.kernels.attention.gpu_backend import TritonAttentionBackend
from miles.kernels.attention.paged import KvShape, PagedAttentionBackend, PagedKVCache, build_attention_metadata
from miles.kernels.attention.params import AttentionInputs, AttentionParams, RelativeAttentionBackend, RelativeBias
from miles.kernels.attention.tree import Segment, TreeAttentionBackend
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.batch_invariant.packed_attention import BatchInvariantTreeBackend, BatchInvariantVarlenBackend
from miles.kernels.batch_invariant.paged_attention import BatchInvariantPagedBackend

HEADS, GROUPS, SIZE, RANK, EXTENT = 4, 2, 6, 3, 5
LENGTHS = (9, 1, 13)
CPU = torch.device("cpu")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs_of(total: int, window: int | None) -> tuple[AttentionInputs, RelativeBias]:
    q, k, v = (
        random(total, HEADS, SIZE, seed=0),
        random(total, GROUPS, SIZE, seed=1),
        random(total, GROUPS, SIZE, seed=2),
    )
    bias = RelativeBias(random(total, HEADS, RANK, seed=3), random(RANK, EXTENT, seed=4))
    return AttentionInputs(q, k, v, AttentionParams(scale=0.3, window=window)), bias


def by_definition(inputs: AttentionInputs, bias: RelativeBias, lengths: tuple[int, ...]) -> Tensor:
    """One score after the other."""
    q, k, v = inputs[:3]
    window, outs, start = inputs.params.window or max(lengths), [], 0
    for length in lengths:
        for i in range(start, start + length):
            for h in range(HEADS):
                g, seen = h // (HEADS // GROUPS), range(max(start, i - window + 1), i + 1)
                near = [bias.weights_THr[i, h] @ bias.profiles_rE[:, i - j] if i - j < EXTENT else 0.0 for j in seen]
                scores = torch.stack([q[i, h] @ k[j, g] * 0.3 + b for j, b in zip(seen, near, strict=True)])
                outs.append(scores.softmax(0) @ v[list(seen), g])
        start += length
    return torch.stack(outs).view(-1, HEADS, SIZE)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("most", [1 << 23, 40], ids=["one slice", "small slices"])
def test_outputs_and_gradients_are_those_of_the_definition(window, most, monkeypatch):
    monkeypatch.setattr(eager, "_MAX_SCORES", most)
    inputs, bias = inputs_of(sum(LENGTHS), window)
    leaves = [x.requires_grad_() for x in (*inputs[:3], *bias)]
    wanted = by_definition(inputs, bias, LENGTHS)
    found = VarlenAttentionBackend(LENGTHS, "cpu").attend_relative(0, inputs, bias)
    grad = random(*wanted.shape, seed=5)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(wanted, leaves, grad))


def some_of(inputs: AttentionInputs, bias: RelativeBias) -> tuple[Tensor, tuple[AttentionInputs, RelativeBias], list]:
    """Queries of the last, the first and the second sequence, of the last only those at its end, and all keys."""
    segments = [Segment(5, ((10, 13),)), Segment(9, ((0, 4), (4, 5))), Segment(1, ((9, 1),))]
    rows = torch.tensor([*range(18, 23), *range(10)])
    part = inputs._replace(q_THd=inputs.q_THd[rows]), bias._replace(weights_THr=bias.weights_THr[rows])
    return rows, part, segments


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("most", [1 << 23, 40], ids=["one slice", "small slices"])
def test_queries_at_the_end_of_their_keys_have_the_outputs_and_gradients_of_the_definition(window, most, monkeypatch):
    monkeypatch.setattr(eager, "_MAX_SCORES", most)
    inputs, bias = inputs_of(sum(LENGTHS), window)
    leaves = [x.requires_grad_() for x in (*inputs[:3], *bias)]
    rows, part, segments = some_of(inputs, bias)
    wanted = by_definition(inputs, bias, LENGTHS)[rows]
    found = TreeAttentionBackend(segments, "cpu", keys=sum(LENGTHS)).attend_relative(0, *part)
    grad = random(*wanted.shape, seed=5)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(wanted, leaves, grad))


@pytest.mark.parametrize("window", [None, 4])
def test_pages_filled_in_chunks_give_the_same(window):
    """A chunk, decoded tokens and another chunk of two sequences, in pages of three tokens."""
    lengths = (12, 10)
    inputs, bias = inputs_of(sum(lengths), window)
    wanted = by_definition(inputs, bias, lengths)
    cache = PagedKVCache([KvShape(GROUPS, SIZE, SIZE)], pages=9, page_size=3, device=CPU, dtype=torch.float64)
    table = np.array([[0, 2, 4, 6], [1, 3, 5, 7]])
    firsts, done = (0, lengths[0]), [0, 0]
    for counts in ((5, 4), (1, 1), (1, 3), (5, 2)):
        order = sorted(range(2), key=lambda b: counts[b] != 1)
        starts, new = np.array([done[b] for b in order]), np.array([counts[b] for b in order])
        _, metadata = build_attention_metadata(starts, new, table[order], 3, device=CPU, dtype=torch.float64)
        rows = torch.cat([firsts[b] + done[b] + torch.arange(counts[b]) for b in order])
        part = AttentionInputs(*(x[rows] for x in inputs[:3]), inputs.params)
        backend = PagedAttentionBackend(cache, metadata)
        found = backend.attend_relative(0, part, bias._replace(weights_THr=bias.weights_THr[rows]))
        torch.testing.assert_close(found, wanted[rows])
        done = [n + count for n, count in zip(done, counts, strict=True)]


@pytest.mark.parametrize("window", [None, 4])
def test_batch_invariant_outputs_and_gradients_are_those_of_the_definition_too(window):
    inputs, bias = inputs_of(sum(LENGTHS), window)
    leaves = [x.requires_grad_() for x in (*inputs[:3], *bias)]
    wanted = by_definition(inputs, bias, LENGTHS)
    grad = random(*wanted.shape, seed=5)
    wanted_grads = torch.autograd.grad(wanted, leaves, grad)
    found = BatchInvariantVarlenBackend(LENGTHS, "cpu").attend_relative(0, inputs, bias)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), wanted_grads)
    # The same sequences in another order, whose last one has its first tokens elsewhere.
    segments = [
        Segment(runs=((10, 13),), length=5),
        Segment(runs=((0, 9),), length=9),
        Segment(runs=((9, 1),), length=1),
    ]
    rows = torch.tensor([*range(18, 23), *range(10)])
    part = inputs._replace(q_THd=inputs.q_THd[rows])
    backend = BatchInvariantTreeBackend(segments, "cpu", keys=sum(LENGTHS))
    again = backend.attend_relative(0, part, bias._replace(weights_THr=bias.weights_THr[rows]))
    assert torch.equal(again, found[rows])


def test_batch_invariant_bits_do_not_depend_on_pages_or_on_other_queries():
    inputs, bias = inputs_of(12, 7)
    inputs, bias = (type(x)(*(t.float() if isinstance(t, Tensor) else t for t in x)) for x in (inputs, bias))
    whole = BatchInvariantVarlenBackend([12], "cpu").attend_relative(0, inputs, bias)
    cache = PagedKVCache([KvShape(GROUPS, SIZE, SIZE)], pages=5, page_size=3, device=CPU, dtype=torch.float32)
    table, done = np.array([[3, 0, 4, 1]]), 0
    for count in (5, 1, 1, 4, 1):
        rows = slice(done, done + count)
        part = AttentionInputs(*(x[rows] for x in inputs[:3]), inputs.params)
        backend = BatchInvariantPagedBackend(cache, np.array([done]), np.array([count]), table, 3)
        found = backend.attend_relative(0, part, bias._replace(weights_THr=bias.weights_THr[rows]))
        assert torch.equal(found, whole[rows])
        done += count


def test_distances_without_a_bias_have_none():
    profile = random(2, EXTENT, seed=0)
    distance = torch.tensor([[-1, 0, EXTENT - 1, EXTENT], [3, 2, 1, 100]])
    found = relative.gather_bias(profile, distance)
    assert found.tolist() == [[0, profile[0, 0], profile[0, -1], 0], [*profile[1, [3, 2, 1]], 0]]


def test_backends_without_the_bias_are_not_taken_for_one_that_has_it():
    assert issubclass(VarlenAttentionBackend, RelativeAttentionBackend)
    assert not issubclass(TritonAttentionBackend, RelativeAttentionBackend)
