"""Sizes and costs, against real decoders, transformers and published figures."""

from dataclasses import replace

import pytest
import torch
from tests.models.oracle import KINDS, hf_model, twin

from miles.models import footprint
from miles.models.decoder import Decoder
from miles.models.families import spec_of

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = QWEN3_06B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_count_is_that_of_the_real_decoder_and_of_transformers(kind):
    model = hf_model(kind)
    decoder = twin(model)
    counted = footprint.parameter_count(decoder.spec)
    assert counted == sum(p.numel() for p in decoder.parameters()) == model.num_parameters()


@pytest.mark.parametrize(
    ("config", "total"),
    [(QWEN3_06B, 596_049_920), (QWEN3_30B_A3B, 30_532_122_624), (LLAMA_8B, 8_030_261_248)],
)
def test_published_models_have_their_published_size(config, total):
    spec = spec_of(config)
    assert footprint.parameter_count(spec) == total
    on_meta = Decoder(spec, device="meta", dtype=torch.bfloat16)
    assert sum(p.numel() for p in on_meta.parameters()) == total
    assert footprint.weight_bytes(spec, "bfloat16") == 2 * total


def test_a_token_meets_only_the_experts_it_is_sent_to():
    spec = spec_of(QWEN3_30B_A3B)
    assert round(footprint.active_parameter_count(spec) / 1e9, 1) == 3.4  # 3.0 without the vocabulary's two matrices
    assert footprint.active_parameter_count(spec_of(QWEN3_06B)) == 596_049_920


def test_keys_and_values_of_a_token_are_counted_in_every_layer():
    assert footprint.kv_bytes_per_token(spec_of(QWEN3_06B), "bfloat16") == 2 * 28 * 8 * 128 * 2
    assert footprint.kv_bytes_per_token(spec_of(LLAMA_8B), "bfloat16") == 131072


def test_adam_keeps_two_moments_and_a_master_of_low_precision_weights():
    spec = spec_of(QWEN3_06B)
    assert footprint.optimizer_bytes(spec, "float32") == 8 * 596_049_920
    assert footprint.optimizer_bytes(spec, "bfloat16") == 12 * 596_049_920
    assert footprint.gradient_bytes(spec, "bfloat16") == 2 * 596_049_920


@pytest.mark.parametrize("kind", ["qwen3 tied, every head its own", "llama", "qwen3 moe"])
def test_forward_operations_are_those_torch_counts(kind):
    """Torch counts matrix products only, and all of a causal square; so the context is every token's."""
    from torch.utils.flop_counter import FlopCounterMode

    model = hf_model(kind)
    spec = twin(model).spec
    tokens = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long))
    counted = footprint.forward_flops_per_token(spec, context=tokens) * tokens
    vectors = spec.num_layers * (2 * spec.hidden_size + 2 * spec.head_dim * spec.qk_norm) + spec.hidden_size
    assert counter.get_total_flops() == pytest.approx(counted - 2 * vectors * tokens, rel=2e-3)


def test_longer_contexts_cost_more():
    spec = spec_of(LLAMA_8B)
    more = footprint.forward_flops_per_token(spec, 1000) - footprint.forward_flops_per_token(spec)
    assert more == 4 * 1000 * 32 * 4096
    assert footprint.forward_flops_per_token(replace(spec, tie_embeddings=True)) == footprint.forward_flops_per_token(
        spec
    )
