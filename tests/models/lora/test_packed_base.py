"""Adapters beside a packed base: torch's autograd on the dequantized expression, and one definition in both planes."""

from dataclasses import replace

import pytest
import torch
from tests.models.lora.test_adapters import filled, lora_for
from tests.models.oracle import hf_model, positions_of, relative, tokens_of, twin
from torch.nn import functional as F

from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import param_shape
from miles.models.decoder import Decoder
from miles.models.layers.linear import Linear, read_weight
from miles.models.lora.layout import adapter_spec, build_factor_map
from miles.models.packed_map import build_packed_map
from miles.models.packing import pack_params
from miles.models.quantization import plan_quantization
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.precision.quantize import dequantize, dequantize_activation, quantize_activation
from miles.train.prefix_sharing import build_attention

LENGTHS = (6, 5)
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
WIDE_EXPERTS = {"qwen3 moe": {"moe_intermediate_size": 64}}


def wide_decoder(kind):
    """A decoder with random weights whose inputs are whole groups."""
    return twin(hf_model(kind, **WIDE, **WIDE_EXPERTS.get(kind, {})))


def packed_decoder(kind, name, *, dtype=torch.float32, numerics=FAST, adapters=None, **quantization):
    """A decoder with packed random weights; with ``adapters`` it has their factors as its own parameters."""
    wide = wide_decoder(kind)
    spec = replace(wide.spec, quantization=QuantizationSpec(format=FORMATS[name], packed=True, **quantization))
    tensors = pack_params(spec, {n: p.detach().to(dtype) for n, p in wide.named_parameters()}, dtype)
    if adapters is not None:
        spec = replace(spec, adapters=adapter_spec(adapters.lora))
        tensors |= adapters.build_engine_factors(dtype)
    decoder = Decoder(spec, device="meta", dtype=dtype, numerics=numerics)
    decoder.load_state_dict(tensors, assign=True)
    return decoder.requires_grad_(False)


def linear_of(decoder, param):
    layer = decoder.get_submodule(param.removesuffix(".weight"))
    assert isinstance(layer, Linear)
    return layer


def hidden(decoder):
    tokens = torch.cat(tokens_of(LENGTHS, vocab=decoder.spec.vocab_size))
    attention = build_attention(LENGTHS, (), torch.device("cpu"), numerics=decoder.numerics)
    return decoder(tokens, positions_of(LENGTHS), attention)


@pytest.mark.parametrize("numerics", [FAST, BATCH_INVARIANT], ids=["fast", "exact"])
@pytest.mark.parametrize("name", ["fp8", "int4_g32", "nvfp4"])
@pytest.mark.parametrize("wanted", [None, "q_proj,v_proj"])
def test_gradients_are_those_of_the_dequantized_expression(name, numerics, wanted):
    decoder = packed_decoder("qwen3", name, numerics=numerics)
    lora = lora_for(decoder.spec, wanted=wanted)
    adapters = filled(lora)
    adapters.attach_beside(decoder)
    param = "layers.1.attention.qkv.weight"
    layer, targets = linear_of(decoder, param), adapters.targets_by_param[param]
    x = torch.randn(7, layer.in_features, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = read_weight(layer, "weight", layer.quantized)
    grad = torch.randn(7, len(layer.weight), generator=torch.Generator().manual_seed(2))
    factors = [factor for target in targets for factor in adapters.factors(target)]
    ours = torch.autograd.grad(y := layer(x), [x, *factors], grad)

    rounded = x
    if FORMATS[name].quantizes_activations:  # the straight-through estimator
        rounded = x + (dequantize_activation(quantize_activation(x.detach(), FORMATS[name])) - x).detach()
    expected = F.linear(rounded, dequantize(weight, torch.float32))
    for target in targets:
        a_rI, b_Or = adapters.factors(target)
        delta = torch.zeros_like(expected)
        delta[:, target.piece.start : target.piece.stop] = lora.scale * (x @ a_rI.T) @ b_Or.T
        expected = expected + delta
    theirs = torch.autograd.grad(expected, [x, *factors], grad)
    assert relative(y, expected) < 1e-6
    for mine, other in zip(ours, theirs, strict=True):
        assert relative(mine, other) < 1e-5


@pytest.mark.parametrize(("kind", "shared"), [("qwen3 moe", False), ("qwen3 moe", True), ("gpt-oss", False)])
@pytest.mark.parametrize("numerics", [FAST, BATCH_INVARIANT], ids=["fast", "exact"])
def test_beside_packed_experts_gradients_are_those_of_the_dequantized_model(kind, shared, numerics):
    """The oracle is the same decoder with wide weights, whose adapters are held against autograd elsewhere."""
    packed = packed_decoder(kind, "int4_g32", numerics=numerics)
    wide = wide_decoder(kind).requires_grad_(False)
    plan = plan_quantization(packed.spec)
    assert any("moe" in name for name in plan)
    for name in plan:
        path, _, attribute = name.rpartition(".")
        module = packed.get_submodule(path)
        quantized = module.quantized if isinstance(module, Linear) else module.quantized[attribute]
        wide.get_parameter(name).data.copy_(dequantize(read_weight(module, attribute, quantized), torch.float32))
    lora = replace(lora_for(wide.spec, wanted="*"), shared_outer=shared, unmerged=True)
    found = []
    for decoder in (packed, wide):
        adapters = filled(lora)
        adapters.attach_beside(decoder)
        out = hidden(decoder)
        found.append((out.detach(), torch.autograd.grad(out.square().sum(), list(adapters.parameters.values()))))
    (ours, our_grads), (theirs, their_grads) = found
    assert relative(ours, theirs) < 1e-5
    for name, mine, other in zip(adapters.parameters, our_grads, their_grads, strict=True):
        assert relative(mine, other) < 1e-4, name


@pytest.mark.parametrize(
    ("kind", "name", "dtype", "wanted"),
    [
        ("qwen3", "fp8", torch.bfloat16, None),
        ("qwen3", "int4_g32", torch.float32, None),
        ("qwen3 moe", "fp8", torch.float32, None),
        ("qwen3 moe", "fp8", torch.bfloat16, "*"),
        ("qwen3 moe", "int4_g32", torch.float32, "experts"),
        ("deepseek v3", "fp8", torch.bfloat16, None),
        ("phi3", "int4_g32", torch.bfloat16, None),
    ],
)
def test_engine_and_trainer_compute_the_same_bits(kind, name, dtype, wanted):
    how = {"dtype": dtype, "numerics": BATCH_INVARIANT, "layers_at_start": 1}  # the first layer is not quantized
    trained = packed_decoder(kind, name, **how)
    adapters = filled(lora_for(trained.spec, wanted=wanted))
    base = hidden(trained)
    adapters.attach_beside(trained)
    beside = hidden(trained)
    assert beside.requires_grad and not torch.equal(beside, base)
    engine = packed_decoder(kind, name, adapters=adapters, **how)
    assert torch.equal(hidden(engine), beside.detach())


def test_a_layer_that_absorbs_its_weight_has_the_adapter_in_it():
    """The engine multiplies MLA's kv_b into queries and outputs, and reads the weight without calling the layer."""
    adapters = filled(lora_for(twin(hf_model("deepseek v3", **WIDE)).spec))
    decoder = packed_decoder("deepseek v3", "fp8", adapters=adapters)
    layer = linear_of(decoder, "layers.0.mla.kv_b.weight")
    target = next(t for t in adapters.lora.targets if t.param_name == "layers.0.mla.kv_b.weight")
    a_rI, b_Or = adapters.factors(target)
    assert relative(layer.merged_weight(), layer.weight + adapters.lora.scale * b_Or @ a_rI) < 1e-6
    latent = torch.randn(3, layer.in_features)
    assert relative(layer(latent), latent @ layer.merged_weight().T) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "phi3", "deepseek v3", "qwen2 moe"])
def test_factors_travel_by_peft_names_and_fill_the_engines_parameters(kind):
    spec = twin(hf_model(kind, **WIDE)).spec
    adapters = filled(lora_for(spec))
    spec = replace(spec, adapters=adapter_spec(adapters.lora))
    engine = adapters.build_engine_factors(torch.float32)
    slices = build_factor_map(spec)
    own = {name for name, _ in Decoder(spec, device="meta", dtype=torch.float32).named_parameters()}
    assert slices.keys() == engine.keys() == own - build_param_map(spec).keys()
    for name, pieces in slices.items():
        assert tuple(engine[name].shape) == param_shape(pieces)
        for piece in pieces:
            assert torch.equal(piece.view(engine[name]), adapters.parameters[piece.hf_name])
    assert build_packed_map(spec).keys() == {*build_param_map(spec), *engine}


def test_only_factors_require_a_gradient_and_the_base_takes_packed_bytes():
    decoder = packed_decoder("qwen3", "int4_g32")
    adapters = filled(lora_for(decoder.spec))
    adapters.attach_beside(decoder)
    hidden(decoder).sum().backward()
    assert all(p.grad is None for p in decoder.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters.parameters.values())
    for name in plan_quantization(decoder.spec):
        layer = linear_of(decoder, name)
        assert sum(p.nbytes for p in layer.parameters()) < 0.57 * layer.in_features * len(layer.weight)
