"""Unmerged adapters, beside a base that is not packed: the merged model and torch's autograd as oracles."""

from dataclasses import replace

import pytest
import torch
from tests.models.lora.test_adapters import filled, lora_for, merged_into
from tests.models.oracle import hf_model, our_logits, positions_of, relative, tokens_of, twin

from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.accounting.activations import layer_bytes
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import param_shape
from miles.models.decoder import Decoder
from miles.models.lora.layout import adapter_spec, build_factor_map
from miles.models.parallel.tp_sharding import compute_tp_shards, shard_spec
from miles.train.prefix_sharing import build_attention

LENGTHS = (6, 5)
FORMS = [
    pytest.param("qwen3", None, {}, id="dense"),
    pytest.param("qwen3", "q_proj,v_proj,down_proj", {"use_rslora": True}, id="rslora"),
    pytest.param("qwen3 moe", "*", {}, id="experts"),
    pytest.param("qwen3 moe", "*.experts.*.up_proj,*.experts.*.down_proj", {}, id="some"),
    pytest.param("qwen3 moe", "experts", {"shared_outer": True}, id="shared"),
    pytest.param("deepseek v3", "attn,experts", {}, id="mla"),
    pytest.param("gpt-oss", "*", {}, id="stacked"),
    pytest.param("step 3.7", "*", {}, id="stacked, gates and ups apart"),
    pytest.param("gpt-oss", "experts", {"shared_outer": True}, id="stacked shared"),
]


def build_engine(wide, adapters, *, numerics=FAST, dtype=torch.float32):
    """A decoder that holds the factors of ``adapters`` as parameters of its own."""
    spec = replace(wide.spec, adapters=adapter_spec(adapters.lora))
    tensors = {name: p.detach().to(dtype) for name, p in wide.named_parameters()}
    decoder = Decoder(spec, device="meta", dtype=dtype, numerics=numerics)
    decoder.load_state_dict(tensors | adapters.build_engine_factors(dtype), assign=True)
    return decoder.requires_grad_(False)


def hidden(decoder):
    tokens = torch.cat(tokens_of(LENGTHS, vocab=decoder.spec.vocab_size))
    attention = build_attention(LENGTHS, (), torch.device("cpu"), numerics=decoder.numerics)
    return decoder(tokens, positions_of(LENGTHS), attention)


def build_adapters(spec, wanted, form):
    return filled(replace(lora_for(spec, wanted=wanted), unmerged=True, **form))


@pytest.mark.parametrize(("kind", "wanted", "form"), FORMS)
def test_logits_and_gradients_are_those_of_the_merged_model(kind, wanted, form):
    beside, merged = twin(hf_model(kind)).requires_grad_(False), twin(hf_model(kind)).requires_grad_(False)
    adapters = build_adapters(beside.spec, wanted, form)
    merged_into(merged, adapters)
    adapters.attach_beside(beside)
    tokens = tokens_of(LENGTHS)
    logits, expected = our_logits(beside, tokens), our_logits(merged, tokens)
    assert relative(logits, expected) < 1e-5
    factors = list(adapters.parameters.values())
    ours = torch.autograd.grad(logits.square().sum(), factors)
    theirs = torch.autograd.grad(expected.square().sum(), factors)
    for mine, other in zip(ours, theirs, strict=True):
        assert relative(mine, other) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "wanted", "form"), FORMS)
def test_engine_and_trainer_compute_the_same_bits(kind, wanted, form, dtype):
    wide = twin(hf_model(kind)).requires_grad_(False)
    trained = Decoder(wide.spec, device="meta", dtype=dtype, numerics=BATCH_INVARIANT)
    trained.load_state_dict({name: p.detach().to(dtype) for name, p in wide.named_parameters()}, assign=True)
    trained.requires_grad_(False)
    adapters = build_adapters(wide.spec, wanted, form)
    base = hidden(trained)
    adapters.attach_beside(trained)
    beside = hidden(trained)
    assert beside.requires_grad and not torch.equal(beside, base)
    with torch.no_grad():
        assert torch.equal(hidden(trained), beside)
    assert torch.equal(hidden(build_engine(wide, adapters, numerics=BATCH_INVARIANT, dtype=dtype)), beside)


@pytest.mark.parametrize(("kind", "wanted", "form"), FORMS)
def test_factors_travel_by_name_and_fill_the_engines_parameters(kind, wanted, form):
    spec = twin(hf_model(kind)).spec
    adapters = build_adapters(spec, wanted, form)
    spec = replace(spec, adapters=adapter_spec(adapters.lora))
    engine, slices = adapters.build_engine_factors(torch.float32), build_factor_map(spec)
    own = {name for name, _ in Decoder(spec, device="meta", dtype=torch.float32).named_parameters()}
    assert slices.keys() == engine.keys() == own - build_param_map(spec).keys()
    for name, pieces in slices.items():
        assert tuple(engine[name].shape) == param_shape(pieces)
        for piece in pieces:
            assert torch.equal(piece.view(engine[name]), adapters.parameters[piece.hf_name])


@pytest.mark.parametrize(("kind", "wanted", "form"), FORMS)
def test_tensor_parallel_ranks_have_shards_of_the_factors_that_their_decoder_expects(kind, wanted, form):
    spec = twin(hf_model(kind)).spec
    adapters = build_adapters(spec, wanted, form)
    spec = replace(spec, adapters=adapter_spec(adapters.lora))
    shards, full = compute_tp_shards(spec), adapters.build_engine_factors(torch.float32)
    own = dict(Decoder(shard_spec(spec, 2), device="meta", dtype=torch.float32).named_parameters())
    for name, tensor in full.items():
        parts = [shards[name].shard(tensor, rank, 2) for rank in range(2)]
        assert all(part.shape == own[name].shape for part in parts)
        assert torch.equal(shards[name].gather(parts), tensor)


@pytest.mark.parametrize(("kind", "wanted", "form"), FORMS)
def test_what_adapters_save_beside_the_base_is_counted(kind, wanted, form):
    spec = twin(hf_model(kind)).spec
    lora = build_adapters(spec, wanted, form).lora
    merged = replace(lora, unmerged=False)
    layer = next(
        i for i in range(spec.num_layers) if any(t.param_name.startswith(f"layers.{i}.") for t in lora.targets)
    )
    counts = [layer_bytes(spec, layer, size=2, fused=True, lora=each) for each in (lora, merged)]
    rows = {True: 0, False: 0}
    for target in lora.targets:
        if target.param_name.startswith(f"layers.{layer}."):
            rows[bool(target.num_experts)] += 1
    per_token = spec.moe.experts_per_token if spec.moe is not None else 0
    assert counts[0] - counts[1] == 2 * lora.rank * (rows[False] + per_token * rows[True])
