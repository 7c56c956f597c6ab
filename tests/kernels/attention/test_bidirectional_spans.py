"""Runs of tokens that attend to each other in both directions: every attention backend gives what the mask gives."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tests.kernels.interpreter  # noqa: F401  (loops in the interpreter)
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.device import CARD, DEVICE, ROUNDING, apart, needs_triton, random
from tests.kernels.formula import gradients, qkv
from tests.kernels.paged_case import case
from tests.tiers import examples

from miles.core.errors import MilesError
from miles.kernels.attention.bidirectional_spans import find_spans
from miles.kernels.attention.paged import PagedAttentionBackend, build_attention_metadata
from miles.kernels.attention.paged_prefill import build_prefill_tiles, prefill_attention, prefill_reference
from miles.kernels.attention.params import AttentionInputs, AttentionParams, PagedAttentionParams
from miles.kernels.batch_invariant import attention_paged
from miles.kernels.batch_invariant.attention import launch_backward, launch_forward
from miles.kernels.batch_invariant.attention_metadata import SpanBatch, build_packed_spans
from miles.kernels.batch_invariant.attention_reference import reference_attention, reference_attention_backward
from miles.kernels.batch_invariant.packed_attention import BatchInvariantVarlenBackend
from miles.kernels.batch_invariant.paged_attention import BatchInvariantPagedBackend
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.kernels.runtime.kv_cache import KvShape, PagedKVCache
from miles.kernels.runtime.triton_compat import HAVE_TRITON
from miles.train.prefix_sharing import TreeNode, build_attention

CPU = torch.device("cpu")
WINDOWS = [None, 4, 30]


def ends_of(length: int, *spans: tuple[int, int]) -> np.ndarray:
    """One past the last token that each sees, where those of a span (start, end) see all of it."""
    ends = np.arange(1, length + 1)
    for start, end in spans:
        ends[start:end] = end
    return ends


def by_mask(q, k, v, ends, params: AttentionParams, past: int = 0):
    """One sequence, whose queries are its last tokens."""
    share, keys = q.shape[1] // k.shape[1], torch.arange(len(k))
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    query = past + torch.arange(len(q))[:, None]
    seen = keys < torch.from_numpy(ends)[:, None]
    if params.window is not None:
        seen &= keys > query - params.window
    scores = (torch.einsum("qhd,khd->hqk", q, k) * params.scale).masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def agree(out, wanted, inputs) -> None:
    tolerance = 1e-11 if out.dtype == torch.float64 else 1e-5
    assert apart(out, wanted) < tolerance
    for mine, theirs in zip(gradients(out, inputs), gradients(wanted, inputs), strict=True):
        # A query that sees one key has a gradient of zero.
        assert float((mine - theirs).norm()) < tolerance * max(1.0, float(theirs.norm()))


def test_spans_are_the_runs_whose_tokens_end_together_and_none_may_be_cut():
    ends = ends_of(12, (2, 5), (5, 6), (7, 12))
    assert find_spans(ends) == [(2, 5), (7, 12)]
    assert find_spans(ends[5:], 5) == [(2, 7)]
    with pytest.raises(AssertionError, match="cut"):
        find_spans(ends[:9])


@settings(max_examples=examples(30), deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=4),
    window=st.sampled_from(WINDOWS),
    exact=st.booleans(),
    seed=st.integers(0, 100),
)
def test_packed_sequences_are_those_of_the_mask(parts, window, exact, seed):
    """Each part is some text and an image; sequences begin with every other part."""
    lengths, ends = [], []
    for number, (text, image) in enumerate(parts):
        if number % 2 == 0:
            lengths.append(0)
            ends.append(np.empty(0, np.int64))
        ends[-1] = np.concatenate((ends[-1], lengths[-1] + ends_of(text + image, (text, text + image))))
        lengths[-1] += text + image
    if not sum(lengths):
        return
    params = AttentionParams(scale=0.3, window=window)
    inputs = qkv(sum(lengths), 4, 2, 8, seed=seed)
    numerics = BATCH_INVARIANT if exact else FAST
    backend = build_attention(lengths, (), CPU, numerics=numerics, visible_ends_T=np.concatenate(ends))
    wanted = [
        by_mask(*each, own, params)
        for *each, own in zip(*(x.split(lengths) for x in inputs), ends, strict=True)
        if len(own)
    ]
    agree(backend(0, AttentionInputs(*inputs, params)), torch.cat(wanted), inputs)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("numerics", [FAST, BATCH_INVARIANT], ids=["fast", "exact"])
def test_samples_that_share_an_image_see_all_of_it(window, numerics):
    nodes = (TreeNode(14), TreeNode(10, parent=0), TreeNode(3, parent=0))
    params, inputs = AttentionParams(scale=0.3, window=window), qkv(27, 4, 2, 8)
    head, tail = ends_of(14, (3, 12)), 14 + ends_of(10, (1, 9))
    ends = np.concatenate((head, tail, 14 + ends_of(3)))
    out = build_attention([24, 17], nodes, CPU, numerics=numerics, visible_ends_T=ends)(
        0, AttentionInputs(*inputs, params)
    )
    q, k, v = inputs
    first = by_mask(q[:24], k[:24], v[:24], ends[:24], params)
    rows = [*range(14), *range(24, 27)]
    second = by_mask(q[24:], k[rows], v[rows], ends[24:], params, past=14)
    agree(out, torch.cat((first, second)), inputs)


@pytest.mark.parametrize("numerics", [FAST, BATCH_INVARIANT], ids=["fast", "exact"])
def test_a_layer_that_ignores_spans_attends_causally_while_others_do_not(numerics):
    """As those of Gemma 4 without a window, packed and in pages."""
    ends, plain = ends_of(40, (6, 15), (20, 36)), AttentionParams(scale=0.3)
    q, k, v = (x.detach() for x in qkv(40, 4, 2, 16, dtype=torch.float32))
    causal = by_mask(q, k, v, ends_of(40), plain)
    inputs = AttentionInputs(q, k, v, replace(plain, ignores_spans=True))
    packed = build_attention([40], (), CPU, numerics=numerics, visible_ends_T=ends)
    nodes = (TreeNode(17), TreeNode(23, parent=0))
    tree = build_attention([40], nodes, CPU, numerics=numerics, visible_ends_T=ends)
    cache = PagedKVCache([KvShape(2, 16, 16)], pages=10, page_size=4, device=CPU, dtype=torch.float32)
    starts, counts, pages = np.array([0]), np.array([40]), np.random.default_rng(0).permutation(10)[None]
    if numerics.batch_invariant:
        paged = BatchInvariantPagedBackend(cache, starts, counts, pages, 4, visible_ends_T=ends)
    else:
        _, layout = build_attention_metadata(
            starts, counts, pages, 4, device=CPU, dtype=torch.float32, visible_ends_T=ends
        )
        paged = PagedAttentionBackend(cache, layout)
    for backend in (packed, tree, paged):
        assert apart(backend(0, inputs), causal) < 1e-5
        assert apart(backend(0, inputs._replace(params=plain)), by_mask(q, k, v, ends, plain)) < 1e-5
        assert apart(backend(0, inputs), causal) < 1e-5


def test_a_fork_within_an_image_is_refused():
    nodes = (TreeNode(6), TreeNode(4, parent=0), TreeNode(4, parent=0))
    ends = np.concatenate((ends_of(10, (3, 8)), 6 + ends_of(4, (0, 2))))
    with pytest.raises(MilesError, match="leave out --share-prefix"):
        build_attention([10, 10], nodes, CPU, numerics=FAST, visible_ends_T=ends)


# -- paged ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_over_pages_are_those_of_the_mask_and_exact_ones_have_the_bits_of_whole_sequences(window):
    """The last chunk begins within an image, as one does behind a cached prefix."""
    ends, params = ends_of(40, (6, 15), (20, 36)), AttentionParams(scale=0.3, window=window)
    q, k, v = (x.detach() for x in qkv(40, 4, 2, 16, dtype=torch.float32))
    wanted = by_mask(q, k, v, ends, params)
    exact = BatchInvariantVarlenBackend([40], CPU, ends)(0, AttentionInputs(q, k, v, params))
    assert apart(exact, wanted) < 1e-5
    pages = np.random.default_rng(0).permutation(20)[None, :10]
    for is_exact in (False, True):
        cache = PagedKVCache([KvShape(2, 16, 16)], pages=20, page_size=4, device=CPU, dtype=torch.float32)
        for start, end in ((0, 6), (6, 17), (17, 40), (25, 40)):
            now, starts, counts = slice(start, end), np.array([start]), np.array([end - start])
            if is_exact:
                attend = BatchInvariantPagedBackend(cache, starts, counts, pages, 4, visible_ends_T=ends[now])
            else:
                _, layout = build_attention_metadata(
                    starts, counts, pages, 4, device=CPU, dtype=torch.float32, visible_ends_T=ends[now]
                )
                attend = PagedAttentionBackend(cache, layout)
            out = attend(0, AttentionInputs(q[now], k[now], v[now], params))
            assert torch.equal(out, exact[now]) if is_exact else apart(out, wanted[now]) < 1e-5


@pytest.mark.parametrize("window", [None, 7])
def test_sequences_of_several_lengths_share_a_block(window):
    starts, counts, params = np.array([4, 0, 9]), np.array([11, 12, 6]), AttentionParams(scale=0.3, window=window)
    ends = [4 + ends_of(11, (2, 9)), ends_of(12), 9 + ends_of(6, (0, 6))]
    cache = PagedKVCache([KvShape(2, 16, 16)], pages=30, page_size=4, device=CPU, dtype=torch.float32)
    held, pages = cache.layers[0], np.random.default_rng(0).permutation(30).reshape(3, 10)
    held.keys.pages.copy_(torch.randn_like(held.keys.pages))
    held.values.pages.copy_(torch.randn_like(held.values.pages))
    q, k, v = (x.detach() for x in qkv(29, 4, 2, 16, dtype=torch.float32))
    _, layout = build_attention_metadata(
        starts, counts, pages, 4, device=CPU, dtype=torch.float32, visible_ends_T=np.concatenate(ends)
    )
    out = PagedAttentionBackend(cache, layout)(0, AttentionInputs(q, k, v, params))
    first = np.cumsum(counts) - counts
    for row, (start, count, own) in enumerate(zip(starts, counts, ends, strict=True)):
        at = np.arange(start + count)
        slots = torch.from_numpy(pages[row, at // 4] * 4 + at % 4)
        keys, values = held.keys.slots[slots], held.values.slots[slots]
        mine = slice(first[row], first[row] + count)
        assert apart(out[mine], by_mask(q[mine], keys, values, own, params, past=start)) < 1e-5


# -- Triton ---------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("exact", [False, True])
def test_prefill_kernels_see_the_whole_span(window, exact):
    made = case([90, 33], heads=1, width=16, dtype=torch.float32)
    counts = np.array([70, 33])
    starts = made.lengths - counts
    ends = np.concatenate((20 + ends_of(70, (3, 60)), ends_of(33, (0, 5), (10, 33)))).astype(np.int32)
    tiles = torch.from_numpy(build_prefill_tiles(starts, counts, made.req_slots_B.cpu().numpy(), 0)).to(DEVICE)
    read = (random(103, 2, 16), made.k_SGd, made.v_SGe, made.block_table_SP, tiles)
    params = PagedAttentionParams(made.page_size, 0.3, window=window)
    ends_T = torch.from_numpy(ends).to(DEVICE)
    attend = attention_paged.prefill_attention if exact else prefill_attention
    wanted = prefill_reference(*read, params, visible_ends_T=ends_T)
    assert apart(attend(*read, params, visible_ends_T=ends_T), wanted) < ROUNDING[torch.float32]
    assert apart(attend(*read, params), wanted) > 0.01


@needs_triton
@pytest.mark.parametrize("window", [None, 20])
def test_kernels_of_exact_training_give_the_gradients_of_plain_torch(window):
    ends = np.concatenate((ends_of(70, (5, 50)), ends_of(20, (0, 6))))
    batch, params = SpanBatch(build_packed_spans([70, 20], ends)), AttentionParams(scale=0.3, window=window)
    q, k, v, grad = random(90, 2, 16), random(90, 1, 16), random(90, 1, 16), random(90, 2, 16)
    out, lse = launch_forward(q, k, v, batch, params, None)
    wanted, wanted_lse = reference_attention(q, k, v, batch.spans, params)
    assert apart(out, wanted) < 1e-5 and apart(lse, wanted_lse) < 1e-5
    mine = launch_backward(grad, (q, k, v, out, lse), batch, params)
    theirs = reference_attention_backward(grad, (q, k, v, wanted, wanted_lse), batch.spans, params)
    for one, other in zip(mine, theirs, strict=True):
        assert apart(one, other) < 1e-5


@pytest.mark.skipif(not CARD, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 30, 300])
@pytest.mark.parametrize("numerics", [FAST, BATCH_INVARIANT], ids=["fast", "exact"])
def test_on_a_gpu_values_and_gradients_are_those_of_the_mask(numerics, window, dtype):
    lengths, params = [400, 90], AttentionParams(scale=0.1, window=window)
    ends = [ends_of(400, (20, 84), (200, 360)), ends_of(90, (0, 64))]
    drawn = qkv(490, 8, 4, 128, dtype=dtype)
    ours, wide = ([x.detach().to(*to).requires_grad_() for x in drawn] for to in ((DEVICE,), (torch.float64,)))
    backend = build_attention(lengths, (), DEVICE, numerics=numerics, visible_ends_T=np.concatenate(ends))
    out = backend(0, AttentionInputs(*ours, params))
    parts = zip(*(x.split(lengths) for x in wide), ends, strict=True)
    wanted = torch.cat([by_mask(*each, own, params) for *each, own in parts])
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    assert out.dtype == dtype and apart(out.cpu(), wanted) < bound
    for mine, theirs in zip(gradients(out, ours), gradients(wanted, wide), strict=True):
        assert apart(mine.cpu(), theirs) < bound


PROGRAM = """
import sys
import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

family, arch, wave, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget(family, int(arch) if family == "cuda" else arch, wave)

driver.set_active(Card())
launch = JITFunction.run

def compile_only(self, *args, grid, warmup, **more):
    kernel = launch(self, *args, grid=grid, warmup=True, **more)
    assert kernel.metadata.shared <= limit, kernel.metadata
    names.append(self.fn.__name__)
    return kernel

names = []
JITFunction.run = compile_only
from miles.kernels.attention import paged_prefill
from miles.kernels.attention.params import AttentionParams, PagedAttentionParams
from miles.kernels.batch_invariant import attention, attention_paged
from miles.kernels.batch_invariant.attention_metadata import SpanBatch, build_packed_spans

q, k = torch.zeros(200, 8, 256, dtype=torch.bfloat16), torch.zeros(320, 4, 256, dtype=torch.bfloat16)
table, ends = torch.zeros(1, 20, dtype=torch.int32), torch.full((200,), 200, dtype=torch.int32)
tiles = torch.from_numpy(paged_prefill.build_prefill_tiles(np.array([0]), np.array([200]), np.array([0]), 0))
for window in (None, 64):
    for attend in (paged_prefill.prefill_attention, attention_paged.prefill_attention):
        attend(q, k, k, table, tiles, PagedAttentionParams(16, 0.1, window=window), visible_ends_T=ends)
    batch, params = SpanBatch(build_packed_spans([200], ends.long().numpy())), AttentionParams(scale=0.1, window=window)
    kv = k[:200].clone()
    out, lse = attention.launch_forward(q, kv, kv, batch, params, None)
    attention.launch_backward(out, (q, kv, kv, out, lse), batch, params)
print(*sorted(set(names)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
def test_the_kernels_compile_for_a_hopper_gpu_with_the_head_dim_of_gemma():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "cuda", "90", "32", str(227 * 1024)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [
        "dkv_kernel",
        "dq_kernel",
        "paged_prefill_kernel",
        "prefill_kernel",
        "row_dot_kernel",
    ]
