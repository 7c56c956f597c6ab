"""The decoder against transformers: values, gradients, packing, recomputation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.each_kind import each_kind
from tests.models.oracle import (
    KINDS,
    assemble,
    gradients,
    hf_logits,
    hf_model,
    our_logits,
    positions_of,
    relative,
    tokens_of,
    twin,
)
from tests.models.small_families.llama_qwen import KINDS as PLAIN
from tests.tiers import examples

from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.checkpoint import hf, param_map
from miles.models.decoder import Decoder, Routing

RAGGED = (7, 1, 30, 3, 12, 12, 90)


def off_by(decoder: Decoder) -> float:
    """How far logits may be from the oracle's: a recurrence is summed in another order, and errors travel with it.

    Scores that are not scaled down make a steep softmax, in which both are as far from float64.
    """
    if decoder.spec.recurrent:
        return 1e-4
    return 3e-5 if any(getattr(layer.mixer, "scale", None) == 1.0 for layer in decoder.spec.layers) else 1e-5


@each_kind
def test_logits_equal_those_of_transformers_on_a_ragged_batch(kind):
    model = hf_model(kind)
    decoder = twin(model)
    sequences = tokens_of(RAGGED)
    with torch.no_grad():
        assert relative(our_logits(decoder, sequences), hf_logits(model, sequences)) <= off_by(decoder)


@settings(max_examples=examples(12), deadline=None)
@given(
    kind=st.sampled_from(sorted(PLAIN)),
    heads=st.sampled_from([(2, 1), (3, 3), (4, 2), (6, 2)]),
    half_dim=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_logits_equal_those_of_transformers_whatever_the_sizes(kind, heads, half_dim, lengths, seed):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 2 * half_dim}
    model = hf_model(kind, seed, hidden_size=12 * heads[0], **sizes)
    sequences = tokens_of(lengths, seed=seed)
    with torch.no_grad():
        assert relative(our_logits(twin(model), sequences), hf_logits(model, sequences)) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_parameter_equal_those_of_transformers(kind):
    model = hf_model(kind)
    decoder = twin(model)
    sequences = tokens_of(RAGGED)
    weights = torch.randn(sum(RAGGED), decoder.spec.vocab_size, generator=torch.Generator().manual_seed(1))
    (hf_logits(model, sequences).log_softmax(-1) * weights).sum().backward()
    (our_logits(decoder, sequences).log_softmax(-1) * weights).sum().backward()
    theirs = assemble(decoder.spec, gradients(model))
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            assert relative(parameter.grad, theirs[name]) <= 10 * off_by(decoder), name


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe normalised"])
def test_a_sequence_does_not_feel_its_batch_mates(kind):
    decoder = twin(hf_model(kind))
    sequences = tokens_of(RAGGED)
    with torch.no_grad():
        packed = our_logits(decoder, sequences)
        alone = torch.cat([our_logits(decoder, [tokens]) for tokens in sequences])
    assert relative(packed, alone) <= 1e-6


@pytest.mark.parametrize("kind", ["llama 3.1", "qwen3 moe in some layers"])
def test_recomputing_layers_in_backward_changes_no_gradient_and_records_routing_once(kind):
    decoder = twin(hf_model(kind))
    sequences = tokens_of(RAGGED)
    gradients = []
    for again in (False, True):
        decoder.checkpoint_layers = again
        routing = Routing(record=True)
        our_logits(decoder, sequences, routing).logsumexp(-1).sum().backward()
        assert len(routing.recorded) == len(decoder.spec.moe_layers)
        gradients.append({name: p.grad.clone() for name, p in decoder.named_parameters()})
        decoder.zero_grad()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("kind", ["qwen2", "qwen3 moe"])
def test_forward_and_backward_repeat_to_the_bit(kind):
    decoder = twin(hf_model(kind))
    runs = []
    for _ in range(2):
        decoder.zero_grad()
        loss = our_logits(decoder, tokens_of(RAGGED)).logsumexp(-1).sum()
        loss.backward()
        runs.append([loss.detach(), *(p.grad.clone() for p in decoder.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_training_works_after_an_engine_used_the_same_sizes_in_inference_mode():
    model = hf_model("qwen3", max_position_embeddings=77)
    with torch.inference_mode():
        our_logits(twin(model), tokens_of([5]))
    our_logits(twin(model), tokens_of([5])).sum().backward()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_bfloat16_is_as_close_to_the_truth_as_transformers_is():
    model = hf_model("qwen3")
    sequences = tokens_of(RAGGED)
    with torch.no_grad():
        truth = hf_logits(model, sequences)
        ours = our_logits(twin(model, torch.bfloat16), sequences).float()
        theirs = hf_logits(model.to(torch.bfloat16), sequences).float()
    ours_off, theirs_off = (ours - truth).square().mean().sqrt(), (theirs - truth).square().mean().sqrt()
    assert ours_off <= 1.2 * theirs_off


@each_kind
def test_the_meta_device_builds_a_decoder_with_exactly_the_parameters_of_the_names_table(kind):
    spec = twin(hf_model(kind)).spec
    decoder = Decoder(spec, device="meta", dtype=torch.float32)
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    assert shapes == {name: param_map.param_shape(pieces) for name, pieces in param_map.build_param_map(spec).items()}
    assert list(shapes) == list(decoder.state_dict())


def test_positions_may_start_anywhere_since_only_their_differences_count():
    decoder = twin(hf_model("llama"))
    tokens, lengths = torch.cat(tokens_of([9, 4])), [9, 4]
    with torch.no_grad():
        here = decoder(tokens, positions_of(lengths), VarlenAttentionBackend(lengths, "cpu"))
        there = decoder(tokens, positions_of(lengths) + 100, VarlenAttentionBackend(lengths, "cpu"))
    assert relative(there, here) <= 1e-5


def test_tokens_and_positions_may_be_int32():
    decoder = twin(hf_model("qwen3"))
    tokens, lengths = torch.cat(tokens_of([9, 4])), [9, 4]
    with torch.no_grad():
        long = decoder(tokens, positions_of(lengths), VarlenAttentionBackend(lengths, "cpu"))
        short = decoder(tokens.int(), positions_of(lengths).int(), VarlenAttentionBackend(lengths, "cpu"))
    assert torch.equal(long, short)


def test_a_tied_head_is_the_embedding_itself_and_an_untied_one_is_not():
    tied, untied = twin(hf_model("qwen2 tied")), twin(hf_model("qwen2"))
    assert tied.head() is tied.embedding.weight
    assert untied.head() is not untied.embedding.weight


def test_random_weights_follow_the_seed():
    spec = twin(hf_model("qwen3 moe")).spec
    first, same, other = (hf.init_random(spec, seed=s, device="cpu", dtype=torch.float32) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert abs(first.embedding.weight.std().item() - 0.02) < 2e-3
    assert torch.equal(first.norm.weight, torch.ones_like(first.norm.weight))
