"""Sizes and costs, against real decoders, transformers and published figures."""

from dataclasses import replace

import pytest
import torch
from tests.models.oracle import KINDS, hf_model, saved, twin, used
from tests.parity.planes import spec_of_kind
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV4Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Gemma3nTextConfig,
    Glm5NextConfig,
    Mistral4Config,
)

from miles.kernels.attention.compressed import pack_windows
from miles.kernels.attention.params import BlockIndexerInputs
from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.numerics import FAST
from miles.models.accounting import params
from miles.models.accounting.known_models import load_known_models
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    MlaSpec,
    MoeSpec,
    PoolIndexerSpec,
    RelativeAttentionSpec,
)
from miles.precision.formats import FORMATS, QuantizationSpec

TOKENS = 64
QWEN3_06B, QWEN3_30B_A3B, LLAMA_8B = (load_known_models()[n] for n in ("Qwen3-0.6B", "Qwen3-30B-A3B", "Llama-3.1-8B"))

# Published parameter counts: in full where they are known so, else in billions.
EXACT = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "SmolLM2-135M": 134_515_008,
    "SmolLM3-3B": 3_075_098_624,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Phi-4": 14_659_507_200,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-3-1B": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Mistral-Small-24B-2501": 23_572_403_200,
    "Mixtral-8x22B-v0.1": 140_620_634_112,
    "Phi-4-mini": 3_836_021_760,
    "Gemma-3-4B": 4_300_079_472,
    "Gemma-3-12B": 12_187_325_040,
    "Gemma-3-27B": 27_432_406_640,
    "GLM-4-9B-0414": 9_400_279_040,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "Moonlight-16B-A3B": 15_960_110_208,
    "Llama-4-Scout-17B-16E": 108_641_793_536,
    "Llama-4-Maverick-17B-128E": 401_583_781_376,
    "Nemotron-Nano-9B-v2": 8_888_227_328,
    "Nemotron-3-Nano-30B-A3B": 31_577_940_288,
}
ROUNDED = {
    "Qwen3-Next-80B-A3B": 79.7,
    "GLM-4.5": 352.8,
    "GLM-4.5-Air": 106.9,
    "DeepSeek-V3": 671.0,
    "Kimi-K2": 1026.4,
    "MiniMax-M2": 228.7,
    "MiniMax-M3": 426.2,
    "GLM-4.6": 352.8,
    "GLM-4.7-Flash": 29.9,
    "GLM-5": 743.9,
    "DeepSeek-R1": 671.0,
    "DeepSeek-V3.2": 671.9,
    "Qwen3.5-4B": 4.5,
    "Qwen3.5-9B": 9.4,
    "Qwen3.5-27B": 27.4,
    "Qwen3.5-35B-A3B": 35.1,
    "Qwen3.6-27B": 27.4,
    "Qwen3.6-35B-A3B": 35.1,
    "Qwen3.8-Flash-Next": 176.9,
    "ERNIE-4.5-0.3B-PT": 0.4,
    "ERNIE-4.5-21B-A3B-PT": 21.8,
    "Mistral-Small-4-119B-2603": 119.0,
    "Gemma-3n-E4B": 6.8,
    # The text model. Two dense layers take 28B and 13B less than the 975B and 276B that are announced.
    "Inkling": 947.0,
    "Inkling-Small": 263.7,
}
# Configs that are the defaults of transformers' config class, which its documentation says are those of the model.
DEFAULTS = {
    "ERNIE-4.5-0.3B-PT": Ernie4_5Config,
    "ERNIE-4.5-21B-A3B-PT": Ernie4_5_MoeConfig,
    "Mistral-Small-4-119B-2603": Mistral4Config,
    "GLM-5.3-Flash": Glm5NextConfig,
    "Gemma-3n-E4B": Gemma3nTextConfig,
    "DeepSeek-V4-Flash": DeepseekV4Config,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_count_is_that_of_the_real_decoder_and_of_transformers(kind):
    model = hf_model(kind)
    decoder = twin(model)
    counted = params.parameter_count(decoder.spec)
    kept = model.state_dict()  # buffers that are saved too: a bias that steers the router is one of our parameters
    buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name in kept)
    every = saved(model)
    unused = sum(every[name].numel() for name in every.keys() - used(decoder.spec, every).keys())
    assert counted == sum(p.numel() for p in decoder.parameters()) == model.num_parameters() + buffers - unused


@pytest.mark.parametrize("name", EXACT)
def test_published_models_have_their_published_size(name):
    spec = spec_from_config(load_known_models()[name])
    assert params.parameter_count(spec) == EXACT[name]
    wide = sum(
        layer.ffn.num_experts for layer in spec.layers if isinstance(layer.ffn, MoeSpec) and layer.ffn.correction
    )
    assert params.weight_bytes(spec, "bfloat16") == 2 * EXACT[name] + 2 * wide  # correction biases are float32


@pytest.mark.parametrize("name", ROUNDED)
def test_the_largest_models_have_their_published_size(name):
    assert round(params.parameter_count(spec_from_config(load_known_models()[name])) / 1e9, 1) == ROUNDED[name]


@pytest.mark.parametrize("name", DEFAULTS)
def test_models_known_from_transformers_have_the_config_of_its_defaults(name):
    known = load_known_models()[name]
    theirs = spec_from_config(DEFAULTS[name]().to_dict() | {"architectures": known["architectures"]})
    assert spec_from_config(known) == replace(theirs, eos_token_ids=())


@pytest.mark.parametrize(
    "name", ["Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-120b", "Qwen3-Next-80B-A3B", "Qwen3-VL-30B-A3B-Instruct"]
)
def test_a_decoder_without_storage_has_the_counted_size(name):
    spec = spec_from_config(load_known_models()[name])
    on_meta = Decoder(spec, device="meta", dtype=torch.bfloat16)
    assert sum(p.numel() for p in on_meta.parameters()) == params.parameter_count(spec)


def test_every_published_model_is_in_one_of_the_tables():
    assert set(EXACT) | set(ROUNDED) <= set(load_known_models())


def test_a_token_meets_only_the_experts_it_is_sent_to():
    spec = spec_from_config(QWEN3_30B_A3B)
    assert round(params.active_parameter_count(spec) / 1e9, 1) == 3.4  # 3.0 without the vocabulary's two matrices
    assert params.active_parameter_count(spec_from_config(QWEN3_06B)) == 596_049_920


def test_keys_and_values_of_a_token_are_counted_in_every_layer():
    assert params.kv_bytes_per_token(spec_from_config(QWEN3_06B), "bfloat16", FAST) == 2 * 28 * 8 * 128 * 2
    assert params.kv_bytes_per_token(spec_from_config(LLAMA_8B), "bfloat16", FAST) == 131072


def test_adam_keeps_two_moments_and_a_master_of_low_precision_weights():
    spec = spec_from_config(QWEN3_06B)
    assert params.optimizer_bytes(spec, "float32") == 8 * 596_049_920
    assert params.optimizer_bytes(spec, "bfloat16") == 12 * 596_049_920
    assert params.gradient_bytes(spec, "bfloat16") == 4 * 596_049_920


class Plainly:
    """An Attend that looks at every token of one sequence, as matrix products torch can count."""

    latent = False
    lengths = (TOKENS,)
    state = None
    levels = ()
    shard = None

    def __call__(self, layer, inputs):
        q_THd, k_TGd, v_TGe, params, _, index = inputs
        if index is not None and not isinstance(index, int):
            if isinstance(index, BlockIndexerInputs):
                q_Thd, keys = index.q_TGd, index.k_Td
            else:
                q_Thd = index.q_THd
                keys = index.k_Td if index.pool is None else index.pool(index.k_Td)
            torch.einsum("thd,sd->hts", q_Thd, keys)
        each = q_THd.shape[1] // k_TGd.shape[1]
        k_THd, v_THe = k_TGd.repeat_interleave(each, 1), v_TGe.repeat_interleave(each, 1)
        scores_HTT = (q_THd.transpose(0, 1) @ k_THd.permute(1, 2, 0)) * params.scale
        return (scores_HTT.softmax(-1) @ v_THe.transpose(0, 1)).transpose(0, 1)

    def attend_relative(self, layer, inputs, bias):
        torch.einsum("thr,re->the", *bias)
        return self(layer, inputs)

    def attend_compressed(self, layer, inputs, compressor):
        windows = pack_windows([TOKENS], compressor.rate, compressor.reach, torch.device("cpu"))
        keys_Wd, index_Wi = compressor.compress(compressor.states_Tx[windows.tokens_ML], windows.numbers_M)
        if index_Wi is not None:
            torch.einsum("thi,wi->htw", compressor.indexer.q_Thi, index_Wi)
        keys_M1d = torch.cat((inputs.k_TGd, keys_Wd.unsqueeze(1)))
        return self(layer, inputs._replace(k_TGd=keys_M1d, v_TGe=keys_M1d))

    def recurrent_state(self, layer):
        return self


@pytest.mark.parametrize("kind", KINDS)
def test_forward_operations_are_those_torch_counts(kind):
    """Torch counts matrix products only, and all of a causal square; so the context is every token's."""
    decoder = twin(hf_model(kind))
    spec = replace(decoder.spec, layers=tuple(unlimited(layer) for layer in decoder.spec.layers))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = decoder(torch.arange(TOKENS) % spec.vocab_size, torch.arange(TOKENS), Plainly())
        compute_logits(hidden, decoder.head(), numerics=decoder.numerics)
    said = params.forward_flops_per_token(spec, context=TOKENS) * TOKENS
    assert counter.get_total_flops() == pytest.approx(said, rel=0.02)


def unlimited(layer):
    """The layer without a window: ``Plainly`` looks at everything."""
    if isinstance(layer.mixer, AttentionSpec):
        index = layer.mixer.indexer
        pool = index.pool if isinstance(index, PoolIndexerSpec) else 1
        index = None if index is None else replace(index, top=TOKENS * pool)
        return replace(layer, mixer=replace(layer.mixer, window=None, chunk=None, indexer=index))
    if isinstance(layer.mixer, MlaSpec) and layer.mixer.indexer is not None:
        top = TOKENS * layer.mixer.indexer.pool
        return replace(layer, mixer=replace(layer.mixer, indexer=replace(layer.mixer.indexer, top=top)))
    if isinstance(layer.mixer, RelativeAttentionSpec):
        return replace(layer, mixer=replace(layer.mixer, window=None))
    if isinstance(layer.mixer, CompressedAttentionSpec):
        own = layer.mixer.compressor
        if own is not None and own.indexer is not None:
            own = replace(own, indexer=replace(own.indexer, top=TOKENS))
        return replace(layer, mixer=replace(layer.mixer, window=TOKENS, compressor=own))
    return layer


def test_longer_contexts_cost_more():
    spec = spec_from_config(LLAMA_8B)
    more = params.forward_flops_per_token(spec, 1000) - params.forward_flops_per_token(spec)
    assert more == 4 * 1000 * 32 * 4096
    assert params.forward_flops_per_token(replace(spec, tie_embeddings=True)) == params.forward_flops_per_token(spec)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "gpt-oss", "phi3", "deepseek v3"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_weights_have_the_bytes_of_the_packed_parameters(kind, name, ranks):
    heads = {"head_dim": 32} if kind == "qwen3" else {}
    wide = spec_of_kind(kind, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, **heads)
    quantization = QuantizationSpec(
        format=FORMATS[name],
        packed=True,
        layers_at_start=1,
        tensor_parallel_size=ranks,
        experts_only=wide.moe is not None,
    )
    spec = replace(wide, quantization=quantization)
    decoder = Decoder(spec, device="meta", dtype=torch.bfloat16)
    held = sum(parameter.nbytes for parameter in decoder.parameters())
    assert params.packed_weight_bytes(spec, "bfloat16") == held < params.weight_bytes(spec, "bfloat16")


@pytest.mark.parametrize("kind", ["deepseek v3.2", "deepseek v4", "gemma4", "minimax-m3", "hybrid glm 5.3 flash"])
def test_untrained_parameters_and_those_of_a_dtype_of_their_own_are_the_decoders(kind):
    spec = spec_of_kind(kind)
    decoder = Decoder(spec, device="meta", dtype=torch.bfloat16)
    listed = {param.name: param for param in params.list_rank_params(spec, params.ShardingDegrees())}
    real = dict(decoder.named_parameters())
    assert {name for name, p in listed.items() if not p.trained} == {n for n, p in real.items() if not p.requires_grad}
    assert {name: p.count * (p.size or 2) for name, p in listed.items()} == {n: p.nbytes for n, p in real.items()}
    assert params.weight_bytes(spec, "bfloat16") == sum(p.nbytes for p in real.values())
    assert params.trained_parameter_count(spec) == sum(p.numel() for p in real.values() if p.requires_grad)
