"""Quantized decoders: which parameters are packed, and that engine and trainer multiply with the same bytes."""

from dataclasses import replace

import pytest
import torch
from tests.models.oracle import positions_of, relative, tokens_of
from tests.models.parallel.test_tp_sharding import logits, tp_logits, whole

from miles.core.errors import MilesError, UsageError
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.decoder import Decoder
from miles.models.packing import pack_params, packed_spec
from miles.models.parallel.tp_sharding import compute_tp_shards
from miles.models.quantization import plan_quantization
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.precision.quantize import dequantize, quantize
from miles.train.prefix_sharing import build_attention

LENGTHS = (7, 1, 19)
MECHANISMS = [
    "llama",
    "qwen3",
    "gemma3",
    "phi3",
    "qwen3 moe",
    "deepseek v3",
    "glm-4.5",
    "gpt-oss",
    "llama 4",
    "step 3.7",
    "hybrid qwen3 next",
    "hybrid nemotron h",
    "hybrid kimi linear",
    "hybrid glm 5.3 flash",
    "hybrid qwen4",
    "deepseek v4",
    "inkling whole",
]


def quantized(decoder, name="fp8", **settings):
    """The decoder as a trainer has it."""
    spec = replace(decoder.spec, quantization=QuantizationSpec(format=FORMATS[name], packed=False, **settings))
    copy = Decoder(spec, device="meta", dtype=torch.float32, numerics=settings.pop("numerics", FAST))
    copy.load_state_dict(dict(decoder.named_parameters()), assign=True)
    return copy


def packed(decoder, numerics=FAST):
    """The trainer's decoder as an engine has it."""
    spec = packed_spec(decoder.spec)
    copy = Decoder(spec, device="meta", dtype=torch.float32, numerics=numerics)
    copy.load_state_dict(pack_params(spec, dict(decoder.named_parameters()), torch.float32), assign=True)
    return copy


def hidden(decoder):
    tokens_T = torch.cat(tokens_of(LENGTHS))
    with torch.no_grad():
        return decoder(tokens_T, positions_of(LENGTHS), VarlenAttentionBackend(LENGTHS, "cpu"))


@pytest.mark.parametrize("kind", MECHANISMS)
def test_engine_and_trainer_multiply_with_the_same_bytes(kind):
    trained = quantized(whole(kind))
    assert torch.equal(hidden(packed(trained)), hidden(trained))
    assert not torch.equal(hidden(trained), hidden(whole(kind)))


@pytest.mark.parametrize("kind", MECHANISMS)
def test_a_quantized_layer_computes_with_dequantized_weights(kind):
    """With weights that are E4M3 values already, quantization changes the activations only."""
    trained = quantized(whole(kind), "fp8")
    for name, plan in plan_quantization(trained.spec).items():
        module, _, attribute = name.rpartition(".")
        parameter = getattr(trained.get_submodule(module), attribute)
        with torch.no_grad():
            rounded = dequantize(quantize(parameter, plan.format, plan.segments), torch.float32)
            again = dequantize(quantize(rounded, plan.format, plan.segments), torch.float32)
        assert relative(again, rounded) < 1e-6


def test_a_fused_weight_is_quantized_as_the_checkpoints_tensors_are():
    """Every tensor of the checkpoint has blocks of its own, however they are concatenated."""
    weight = torch.randn(100, 64)
    fused = quantize(weight, FORMATS["fp8"], (60, 40))
    apart = [quantize(part, FORMATS["fp8"]) for part in weight.split((60, 40))]
    assert torch.equal(fused.data.view(torch.uint8), torch.cat([each.data for each in apart]).view(torch.uint8))
    assert fused.row_block == 1 and fused.scale.shape == (100, 1)
    assert torch.equal(fused.scale[0], apart[0].scale[0]) and torch.equal(fused.scale[60], apart[1].scale[0])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe"])
@pytest.mark.parametrize("name", ["int8"])
def test_tensor_parallel_ranks_share_the_packed_weights(kind, name):
    spec = replace(
        whole(kind).spec,
        quantization=QuantizationSpec(format=FORMATS[name], packed=True, tensor_parallel_size=2),
    )
    decoder = Decoder(spec, device="meta", dtype=torch.float32)
    decoder.load_state_dict(pack_params(spec, dict(whole(kind).named_parameters()), torch.float32), assign=True)
    assert set(compute_tp_shards(spec)) == {key for key, _ in decoder.named_parameters()}
    with torch.no_grad():
        assert relative(tp_logits(decoder, 2, None), logits(decoder, None)) < 1e-5


def test_ranks_that_would_scale_activations_by_their_part_are_refused():
    spec = replace(
        whole("qwen3").spec,
        quantization=QuantizationSpec(format=FORMATS["fp8_channel"], packed=True, tensor_parallel_size=2),
    )
    with pytest.raises(UsageError, match="fp8_channel has one scale for all inputs of a token, of which 2 tensor-par"):
        compute_tp_shards(spec)


def test_blocks_that_ranks_cannot_share_are_refused():
    spec = replace(
        whole("qwen3").spec,
        quantization=QuantizationSpec(format=FORMATS["fp8"], packed=True, tensor_parallel_size=2),
    )
    with pytest.raises(UsageError, match="input channels, which 2 tensor-parallel ranks cannot share in blocks of 128"):
        compute_tp_shards(spec)


def test_first_and_last_layers_may_stay_wide():
    spec = whole("qwen3").spec
    everything = plan_quantization(replace(spec, quantization=QuantizationSpec(format=FORMATS["fp8"], packed=True)))
    some = plan_quantization(
        replace(spec, quantization=QuantizationSpec(format=FORMATS["fp8"], packed=True, layers_at_start=1))
    )
    assert {name for name in everything if name.startswith("layers.0.")} == everything.keys() - some.keys()
    assert not any("norm" in name or "embedding" in name or "lm_head" in name for name in everything)


def test_only_experts_may_be_quantized():
    spec = whole("qwen3 moe").spec
    plan = plan_quantization(
        replace(spec, quantization=QuantizationSpec(format=FORMATS["fp8"], packed=True, experts_only=True))
    )
    assert plan and all(".moe." in name and "router" not in name for name in plan)


def test_weights_that_are_not_finite_are_refused_by_name():
    trained = quantized(whole("qwen3"))
    params = {name: param.clone() for name, param in trained.named_parameters()}
    params["layers.0.mlp.down.weight"][0, 0] = float("inf")
    with pytest.raises(MilesError, match=r"layers\.0\.mlp\.down\.weight has values that are not finite"):
        pack_params(packed_spec(trained.spec), params, torch.float32)


def test_exact_numerics_are_exact_with_quantized_weights():
    for kind in ("qwen3", "qwen3 moe"):
        decoder = whole(kind)
        spec = replace(decoder.spec, quantization=QuantizationSpec(format=FORMATS["fp8"], packed=False))
        trained = Decoder(spec, device="meta", dtype=torch.float32, numerics=BATCH_INVARIANT)
        trained.load_state_dict(dict(decoder.named_parameters()), assign=True)
        tokens = torch.cat(tokens_of(LENGTHS))
        with torch.no_grad():
            together = trained(
                tokens,
                positions_of(LENGTHS),
                build_attention(LENGTHS, (), torch.device("cpu"), numerics=BATCH_INVARIANT),
            )
            served = packed(trained, BATCH_INVARIANT)
            alone = served(
                tokens[:7],
                positions_of(LENGTHS[:1]),
                build_attention(LENGTHS[:1], (), torch.device("cpu"), numerics=BATCH_INVARIANT),
            )
        assert torch.equal(together[:7], alone)
