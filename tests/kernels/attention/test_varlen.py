"""Packed attention against the formula, sequence by sequence in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.formula import by_hand, gradients, index_of, off, part, qkv, tensors
from tests.tiers import examples
from torch.utils.checkpoint import checkpoint

from miles.kernels.attention import varlen
from miles.kernels.attention.params import AttentionInputs, AttentionParams, IndexerInputs
from miles.kernels.attention.varlen import VarlenAttentionBackend, group_by_length

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLAIN = AttentionParams(scale=0.5)

lengths_of = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)
heads_of = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])
dims_of = st.sampled_from([(4, 4), (6, 4), (4, 6)])
terms_of = st.builds(
    AttentionParams,
    scale=st.sampled_from([0.5, 0.31]),
    window=st.none() | st.integers(1, 40),
    chunk=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(1.5),
)


@settings(max_examples=examples(80), deadline=None)
@given(lengths_of, heads_of, dims_of, terms_of, st.booleans(), st.sampled_from([2, 256]), st.integers(0, 100))
def test_values_and_gradients_are_the_formulas(lengths, heads, dims, params, has_sinks, masked_length, seed):
    inputs = qkv(sum(lengths), *heads, *dims, seed)
    sinks = tensors((heads[0],), seed=seed + 1) if has_sinks else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "_MAX_MASKED_LENGTH", masked_length)
        out = VarlenAttentionBackend(lengths, "cpu")(
            0, AttentionInputs(*inputs, params, sinks_H=sinks[0] if has_sinks else None)
        )
    wanted = by_hand(*inputs, lengths, params, *sinks)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    for a, b in zip(gradients(out, inputs + sinks), gradients(wanted, inputs + sinks), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@settings(max_examples=examples(30), deadline=None)
@given(lengths_of, heads_of, dims_of, st.integers(1, 20), st.none() | st.just(1.5), st.integers(0, 100))
def test_chosen_tokens_are_all_that_is_seen_here_and_in_layers_that_follow(lengths, heads, dims, top, softcap, seed):
    inputs, index = qkv(sum(lengths), *heads, *dims, seed), index_of(sum(lengths), top, seed=seed)
    attend, params = VarlenAttentionBackend(lengths, "cpu"), AttentionParams(scale=0.5, softcap=softcap)
    wanted = by_hand(*inputs, lengths, params, index=index)
    for layer, given_index in ((3, index), (4, 3)):
        out = attend(layer, AttentionInputs(*inputs, params, indexer=given_index))
        assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
        for a, b in zip(gradients(out, inputs), gradients(wanted, inputs), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_a_layer_cannot_follow_one_that_has_not_chosen():
    with pytest.raises(AssertionError, match="layer 2"):
        VarlenAttentionBackend([8], "cpu")(3, AttentionInputs(*qkv(8, 2, 1, 4), PLAIN, indexer=2))


VARIED = {
    "plain": PLAIN,
    "window": AttentionParams(scale=0.5, window=7),
    "chunk": AttentionParams(scale=0.5, chunk=9),
    "softcap": AttentionParams(scale=0.5, softcap=2.0),
    "window, softcap": AttentionParams(scale=0.5, window=7, softcap=2.0),
}


@pytest.mark.parametrize(("kind", "chosen"), [*((kind, False) for kind in VARIED), ("plain", True), ("softcap", True)])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_a_sequence_does_not_notice_its_batch_mates(kind, chosen, has_sinks):
    params = VARIED[kind]
    lengths = [40, 3, 25, 0, 38]
    inputs = qkv(sum(lengths), 4, 2, 8, dtype=torch.float32)
    sinks = tensors((4,), dtype=torch.float32)[0] if has_sinks else None
    index = index_of(sum(lengths), 6, dtype=torch.float32) if chosen else None
    together = VarlenAttentionBackend(lengths, "cpu")(0, AttentionInputs(*inputs, params, sinks_H=sinks, indexer=index))
    start = 0
    for n in lengths:
        own = [x[start : start + n] for x in inputs]
        alone = VarlenAttentionBackend([n], "cpu")(
            0, AttentionInputs(*own, params, sinks_H=sinks, indexer=part(index, start, start + n))
        )
        assert torch.allclose(together[start : start + n], alone, rtol=0, atol=1e-6)
        start += n


@pytest.mark.parametrize("params", VARIED.values(), ids=VARIED.keys())
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_the_same_inputs_give_the_same_bits(params, has_sinks):
    lengths = [50, 300, 7, 41]
    inputs = qkv(sum(lengths), 4, 2, 8, dtype=torch.float32)
    sinks = tensors((4,), dtype=torch.float32) if has_sinks else []

    def once():
        out = VarlenAttentionBackend(lengths, "cpu")(
            0, AttentionInputs(*inputs, params, sinks_H=sinks[0] if has_sinks else None)
        )
        return [out, *gradients(out, inputs + sinks)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("params", VARIED.values(), ids=VARIED.keys())
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_bfloat16_is_close(params, has_sinks):
    lengths = [50, 300, 7, 41]
    inputs = qkv(sum(lengths), 4, 2, 16, 8, dtype=torch.bfloat16)
    sinks = tensors((4,), dtype=torch.bfloat16) if has_sinks else []
    exact = [x.detach().double().requires_grad_() for x in inputs + sinks]
    out = VarlenAttentionBackend(lengths, "cpu")(
        0, AttentionInputs(*inputs, params, sinks_H=sinks[0] if has_sinks else None)
    )
    wanted = by_hand(*exact[:3], lengths, params, *exact[3:])
    assert out.dtype == torch.bfloat16 and off(out, wanted) < 1e-2
    for a, b in zip(gradients(out, inputs + sinks), gradients(wanted, exact), strict=True):
        assert a.dtype == torch.bfloat16 and off(a, b) < 2e-2


def test_layers_that_run_again_in_backward_choose_as_they_did():
    lengths = [30, 4, 21]
    total = sum(lengths)
    x, weight_1, weight_2 = tensors((total, 2, 8), (8, 8), (8, 8))
    torch.manual_seed(0)

    def layer(number, attend, x, weight, noise):
        # Each time it runs the scores are a little different, as with kernels whose sums have no order.
        scores = (x.detach() + noise * torch.randn_like(x)).contiguous()
        index = IndexerInputs(q_THd=scores, k_Td=scores[:, 0], weights_TH=scores[..., 0], topk=5) if number == 0 else 0
        y = x @ weight
        return x + attend(number, AttentionInputs(y, y, y.tanh(), PLAIN, indexer=index))

    def run(again, noise):
        attend, y = VarlenAttentionBackend(lengths, "cpu"), x
        for number, weight in enumerate((weight_1, weight_2)):
            given_all = (number, attend, y, weight, noise)
            y = (
                checkpoint(layer, *given_all, use_reentrant=False, preserve_rng_state=False)
                if again
                else layer(*given_all)
            )
        return [y, *gradients(y, (x, weight_1, weight_2))]

    assert all(torch.equal(a, b) for a, b in zip(run(True, 0.0), run(False, 0.0), strict=True))
    torch.manual_seed(1)
    kept = run(False, 1.0)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(run(True, 1.0), kept, strict=True))


def test_a_new_forward_chooses_anew():
    attend, inputs = VarlenAttentionBackend([20], "cpu"), qkv(20, 2, 1, 4)
    for seed in range(2):
        index = index_of(20, 4, seed=seed)
        wanted = by_hand(*inputs, [20], PLAIN, index=index)
        assert torch.allclose(attend(0, AttentionInputs(*inputs, PLAIN, indexer=index)), wanted)
        assert torch.allclose(attend(1, AttentionInputs(*inputs, PLAIN, indexer=0)), wanted)


@settings(deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=40))
def test_every_sequence_is_in_one_block_and_padding_is_less_than_half(lengths):
    blocks = group_by_length(lengths)
    assert sorted(i for block in blocks for i in block) == [i for i, n in enumerate(lengths) if n]
    for block in blocks:
        used = sum(lengths[i] for i in block)
        assert len(block) * max(lengths[i] for i in block) < 2 * used


@pytest.mark.parametrize(("lengths", "alone", "shapes"), [([6, 6, 6], 6, [(3, 6)]), ([9, 8], 5, [(1, 9), (1, 8)])])
def test_blocks_without_padding_in_the_order_of_the_tokens_move_no_row(lengths, alone, shapes):
    layout = VarlenAttentionBackend(lengths, "cpu")._packed.get_layout(alone)
    assert (layout.shapes, layout.token_P, layout.slot_T) == (shapes, None, None)


def test_like_lengths_are_one_call():
    assert len(group_by_length([10, 12, 19, 15])) == 1


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_an_empty_batch_gives_an_empty_result(lengths):
    assert VarlenAttentionBackend(lengths, "cpu")(0, AttentionInputs(*qkv(0, 2, 1, 4, 3), PLAIN)).shape == (0, 2, 3)


def test_a_batch_of_other_lengths_is_refused():
    with pytest.raises(AssertionError):
        VarlenAttentionBackend([3, 4], "cpu")(0, AttentionInputs(*qkv(8, 2, 1, 4), PLAIN))


def test_recurrent_layers_are_told_that_every_sequence_begins_here():
    carry = VarlenAttentionBackend([3, 0, 4], "cpu").recurrent_state(1)
    carry.update((torch.zeros(3, 2),))
    assert (list(carry.lengths), carry.state) == ([3, 0, 4], None)


# -- on a GPU -------------------------------------------------------------------------------

CUDA = {
    "plain": (64, 64, AttentionParams(scale=0.125)),
    "scale": (64, 64, AttentionParams(scale=0.3)),
    "window": (64, 64, AttentionParams(scale=0.125, window=37)),
    "chunk": (64, 64, AttentionParams(scale=0.125, chunk=48)),
    "softcap": (64, 64, AttentionParams(scale=0.125, softcap=2.0)),
    "softcap, window": (64, 64, AttentionParams(scale=0.125, softcap=2.0, window=37)),
    "latent": (192, 128, AttentionParams(scale=0.07)),
    "odd": (20, 12, AttentionParams(scale=0.2)),
    "wide": (320, 256, AttentionParams(scale=0.07)),
    "wider": (512, 512, AttentionParams(scale=0.05)),
}


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("dim", "value_dim", "params"), CUDA.values(), ids=CUDA.keys())
def test_on_cuda_values_and_gradients_are_the_formulas(dim, value_dim, params, has_sinks, dtype):
    lengths = [100, 1, 37, 513, 64]
    drawn = qkv(sum(lengths), 8, 2, dim, value_dim, dtype=dtype) + (tensors((8,), dtype=dtype) if has_sinks else [])
    ours = [x.detach().cuda().requires_grad_() for x in drawn]
    exact = [x.detach().double().requires_grad_() for x in drawn]
    out = VarlenAttentionBackend(lengths, "cuda")(
        0, AttentionInputs(*ours[:3], params, sinks_H=ours[3] if has_sinks else None)
    )
    wanted = by_hand(*exact[:3], lengths, params, *exact[3:])
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    assert out.dtype == dtype and off(out, wanted) < bound
    for a, b in zip(gradients(out, ours), gradients(wanted, exact), strict=True):
        assert off(a, b) < bound


@needs_cuda
def test_on_cuda_no_probabilities_of_wide_heads_are_kept():
    length, heads = 16_384, 8
    drawn = [x.detach().cuda().requires_grad_() for x in qkv(length, heads, 2, 512, 512, dtype=torch.bfloat16)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    params = AttentionParams(scale=0.05)
    VarlenAttentionBackend([length], "cuda")(0, AttentionInputs(*drawn, params)).sum().backward()
    probabilities = heads * length * length * 4
    assert torch.cuda.max_memory_allocated() - before < probabilities / 4


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_chosen_tokens_are_all_that_is_seen(dtype):
    lengths = [100, 1, 37, 213, 64]
    drawn, index = qkv(sum(lengths), 4, 4, 96, 64, dtype=dtype), index_of(sum(lengths), 50, 8, 32, dtype=dtype)
    wide = IndexerInputs(
        q_THd=index.q_THd.double(), k_Td=index.k_Td.double(), weights_TH=index.weights_TH.double(), topk=50
    )
    there = IndexerInputs(q_THd=index.q_THd.cuda(), k_Td=index.k_Td.cuda(), weights_TH=index.weights_TH.cuda(), topk=50)
    ours = [x.detach().cuda().requires_grad_() for x in drawn]
    exact = [x.detach().double().requires_grad_() for x in drawn]
    attend, params = VarlenAttentionBackend(lengths, "cuda"), AttentionParams(scale=0.1)
    wanted = by_hand(*exact, lengths, params, index=wide)
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    for layer, given_index in ((0, there), (1, 0)):
        out = attend(layer, AttentionInputs(*ours, params, indexer=given_index))
        assert off(out, wanted) < bound
        for a, b in zip(gradients(out, ours), gradients(wanted, exact), strict=True):
            assert off(a, b) < bound
