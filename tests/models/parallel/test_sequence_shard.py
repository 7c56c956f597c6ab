"""Recurrences over context ranks that pass states on or exchange sequences, against a loop over all tokens."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.linear_attention import test_gated_delta_rule as delta
from tests.kernels.linear_attention import test_kimi_delta_rule as kimi
from tests.kernels.linear_attention import test_mamba2_ssd as mamba
from tests.kernels.recurrences import apart, copies
from tests.pool import ranks
from torch import distributed as dist

from miles.backends.fsdp.autograd_collectives import gather_from_sequence_region
from miles.backends.fsdp.device_mesh import CommGroup
from miles.cluster.parallel_dims import MIN_SCANNED_CHUNK, assign_scans, compute_scan_imbalance
from miles.kernels.attention.varlen import FreshRecurrentState
from miles.kernels.batch_invariant import recurrent_scan
from miles.kernels.linear_attention.gated_delta_rule import gated_delta_rule
from miles.kernels.linear_attention.kimi_delta_rule import kimi_delta_rule
from miles.kernels.linear_attention.mamba2_ssd import mamba2_ssd
from miles.kernels.linear_attention.state_passing import split_delta_rule, split_mamba2_ssd
from miles.kernels.numerics import FAST
from miles.models.layers.recurrent_scan import scan_tokens
from miles.models.parallel.sequence_shard import shard_sequences

# A rule, how it is split, its batch-invariant form, the loop over tokens, what makes its inputs, and its weights.
RULES = {
    "gated delta": (
        gated_delta_rule,
        partial(split_delta_rule, gated_delta_rule),
        recurrent_scan.gated_delta_rule,
        delta.by_hand,
        delta.inputs,
        (),
    ),
    "kimi delta": (
        kimi_delta_rule,
        partial(split_delta_rule, kimi_delta_rule),
        recurrent_scan.kimi_delta_rule,
        kimi.by_hand,
        kimi.inputs,
        (),
    ),
    "mamba-2": (mamba2_ssd, split_mamba2_ssd, recurrent_scan.mamba2_ssd, mamba.by_hand, mamba.inputs, (2, 5)),
}
# Several chunks, fewer tokens than chunks, one token, none; and one sequence, which ranks other than its owner miss.
BATCHES = {
    "split": ([20, 3, 70, 1, 0, 9], [None] * 6),
    "whole": ([20, 3, 70, 1, 0, 9], [1, 0, 0, 1, 0, 1]),
    "both": ([20, 3, 70, 1, 0, 9], [1, None, None, 0, 1, 0]),
    "both without padding": ([20, 3, 70, 1, 0, 9], [1, None, None, 0, 1, 0]),
    "alone": ([5], [0]),
}
# Ranks that share a GPU exchange over gloo, through the host.
ON_A_GPU = pytest.param(
    2, "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
)
PLACES = [(2, "cpu"), pytest.param(4, "cpu", marks=pytest.mark.extended), ON_A_GPU]
FILL = {batch: 0 if "without" in batch else 3 for batch in BATCHES}


def cut(lengths, rank, world):
    """The sizes of all chunks, and a rank's tokens."""
    bounds_N = [np.arange(2 * world + 1) * n // (2 * world) for n in lengths]
    starts = np.cumsum([0, *lengths])
    cells = rank, 2 * world - 1 - rank
    chunks = [np.arange(b[j], b[j + 1]) + s for b, s in zip(bounds_N, starts, strict=False) for j in cells]
    return np.array([np.diff(bounds) for bounds in bounds_N]), torch.from_numpy(np.concatenate(chunks))


def run_on_a_rank(rank, world, cases, device):
    """The outputs and gradients of each case, of this rank's tokens, and of weights."""
    group = CommGroup(dist.group.WORLD, torch.device(device), numerics=FAST)
    return [run_case(group, *case) for case in cases]


def run_case(group, name, batch, is_exact, dtype):
    rule, split, exact, _, make, weights = RULES[name]
    (lengths, owners), fill = BATCHES[batch], FILL[batch]
    *inputs, _ = make(lengths, dtype=dtype)
    sizes_Nc, own_t = cut(lengths, group.rank, group.world)
    gather_rows = partial(gather_from_sequence_region, group=group)
    shard = shard_sequences(sizes_Nc, owners, fill, group, gather_rows, group.device)
    own = [x if i in weights else x[own_t] for i, x in enumerate(inputs)]
    (leaves,) = copies([x.to(group.device) for x in own], 1)

    def scan(tokens, lengths, before, part):
        given = list(tokens)
        for i in weights:
            given.insert(i, leaves[i])
        if is_exact:
            return exact(*given, lengths, None, part)
        return (rule(*given, lengths, None)[0] if part is None else split(*given, part)), None

    padded = [torch.cat((x, x.new_zeros(fill, *x.shape[1:]))) for i, x in enumerate(leaves) if i not in weights]
    out = scan_tokens(FreshRecurrentState(lengths, shard=shard), scan, padded)
    assert len(out) == len(own_t) + fill
    out = out[: len(own_t)]
    (out.sin() * out).sum().backward()
    return out.detach().cpu().numpy(), [None if x.grad is None else x.grad.cpu().numpy() for x in leaves]


def join(found, lengths, world):
    """A row for each token, of what each rank has of its own."""
    own = torch.cat([cut(lengths, rank, world)[1] for rank in range(world)])
    rows = torch.cat([torch.from_numpy(x) for x in found])
    return torch.empty_like(rows).index_copy_(0, own, rows)


@cache
def loop(name, batch):
    """The outputs and gradients of the loop over all tokens, in float64."""
    *_, by_hand, make, _ = RULES[name]
    lengths = BATCHES[batch][0]
    *inputs, state = make(lengths)
    (leaves,) = copies(inputs, 1)
    wanted, _ = by_hand(*leaves, lengths, torch.zeros_like(state))
    (wanted.sin() * wanted).sum().backward()
    return wanted, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(("world", "device"), PLACES)
def test_values_and_gradients_are_those_of_the_loop(world, device):
    # The Triton kernel of batch-invariant scans is for float32.
    exact_dtype = torch.float32 if device == "cuda" else torch.float64
    kinds = [(False, torch.float64), (True, exact_dtype)]
    cases = [(name, batch, *kind) for name in RULES for batch in BATCHES for kind in kinds]
    for case, *found in zip(cases, *ranks(world, run_on_a_rank, cases, device), strict=True):
        name, batch, _, dtype = case
        near = 1e-9 if dtype == torch.float64 else 1e-4
        lengths, weights = BATCHES[batch][0], RULES[name][-1]
        wanted, wanted_grads = loop(name, "split" if batch != "alone" else batch)
        outs, grads = zip(*found, strict=True)
        assert apart(join(outs, lengths, world), wanted) < near, case
        for i, wanted_grad in enumerate(wanted_grads):
            each = [grad[i] for grad in grads]
            assert all(grad is not None for grad in each), case
            ours = sum(map(torch.from_numpy, each)) if i in weights else join(each, lengths, world)
            assert apart(ours, wanted_grad) < near, case


@pytest.mark.parametrize(("world", "device"), PLACES)
def test_batch_invariant_values_have_the_bits_of_a_scan_of_whole_sequences(world, device):
    cases = [(name, batch, True, torch.float32) for name in RULES for batch in BATCHES]
    for case, *found in zip(cases, *ranks(world, run_on_a_rank, cases, device), strict=True):
        name, batch, *_ = case
        lengths, (_, _, exact, _, make, _) = BATCHES[batch][0], RULES[name]
        *inputs, _ = make(lengths, dtype=torch.float32)
        with torch.no_grad():
            wanted, _ = exact(*(x.to(device) for x in inputs), lengths, None)
        assert torch.equal(join([out for out, _ in found], lengths, world), wanted.cpu()), case


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40), context=st.integers(2, 8))
def test_only_long_sequences_are_split_and_ranks_scan_about_equally_many_tokens(lengths, context):
    owners = assign_scans(lengths, context)
    shortest = 2 * context * MIN_SCANNED_CHUNK
    split = [length for length, owner in zip(lengths, owners, strict=True) if owner is None]
    whole = [length for length, owner in zip(lengths, owners, strict=True) if owner is not None]
    assert min(split, default=shortest) >= max(shortest, max(whole, default=0) if split else 0)
    loads = [sum(n for n, owner in zip(lengths, owners, strict=True) if owner == rank) for rank in range(context)]
    most, mean = max(loads) + sum(split) / context, sum(lengths) / context
    assert most <= (1 + compute_scan_imbalance(sum(lengths), max(lengths), context)) * mean + 1e-6
