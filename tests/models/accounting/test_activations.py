"""What a step is said to keep for its backward pass, against what autograd keeps."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from tests.models.lora.test_adapters import filled, lora_for
from tests.models.oracle import KINDS, hf_model, positions_of, tokens_of, twin

from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.linear_attention import chunked_scan
from miles.models.accounting import activations
from miles.models.accounting.activations import layer_bytes, stream_bytes
from miles.models.accounting.params import CHUNK
from miles.models.decoder import Decoder
from miles.models.layers import rope
from miles.models.packing import pack_params
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.train import logprobs

LENGTHS = (60, 60)
WIDE = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 32}
BLOCKS = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "head_dim": 16,
}


def kept_bytes(decoder: Decoder, trained: Iterable[torch.Tensor] = ()) -> int:
    """All storage autograd holds after a forward, weights aside."""
    own = {p.untyped_storage().data_ptr() for p in (*decoder.parameters(), *trained)}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.cat(tokens_of(LENGTHS, vocab=decoder.spec.vocab_size))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(tokens, positions_of(LENGTHS), VarlenAttentionBackend(LENGTHS, "cpu"))
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def counted_bytes(spec, lora=None):
    """The layers', the final norm's (nothing reads its output here) and the tokens'."""
    layers = sum(layer_bytes(spec, i, size=4, fused=False, lora=lora) for i in range(spec.num_layers))
    norm = (1 if lora else 2) * spec.hidden_size * 4
    return (layers + norm + stream_bytes(spec, 4) + 8) * sum(LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_keep_what_they_are_said_to_keep(kind):
    decoder = twin(hf_model(kind))
    assert counted_bytes(decoder.spec) == pytest.approx(kept_bytes(decoder), rel=0.1)


def quantized_decoder(wide, name, **options):
    spec = replace(wide.spec, quantization=QuantizationSpec(format=FORMATS[name], packed=False, **options))
    decoder = Decoder(spec, device="cpu", dtype=torch.float32)
    decoder.load_state_dict(wide.state_dict())
    return decoder


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "gpt-oss", "glm4"])
def test_every_format_keeps_within_three_percent_of_what_is_counted(kind, name):
    decoder = quantized_decoder(twin(hf_model(kind, **BLOCKS)), name)
    assert counted_bytes(decoder.spec) == pytest.approx(kept_bytes(decoder), rel=0.03)


FAMILIES = ["qwen2 moe", "deepseek v2 lite", "deepseek v3", "deepseek v3.2", "hybrid qwen3 next", "hybrid nemotron 3"]


@pytest.mark.parametrize("kind", [*FAMILIES, "hybrid nemotron 3 latent, in groups"])
@pytest.mark.parametrize("options", [{}, {"experts_only": True}, {"layers_at_start": 1}], ids=str)
def test_quantized_inputs_change_what_is_kept_by_the_bytes_that_are_counted(kind, options):
    wide = twin(hf_model(kind, **WIDE))
    decoder = quantized_decoder(wide, "fp8", **options)
    change = kept_bytes(decoder) - kept_bytes(wide)
    assert counted_bytes(decoder.spec) - counted_bytes(wide.spec) == change < 0


def test_weight_only_formats_keep_the_inputs_as_they_are():
    wide = twin(hf_model("qwen3 moe", **WIDE))
    assert kept_bytes(quantized_decoder(wide, "int4_g32")) == kept_bytes(wide)


@pytest.mark.parametrize("wanted", [None, "q_proj,v_proj"])
@pytest.mark.parametrize("name", [None, "fp8", "int4_g32"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "glm4"])
def test_adapters_keep_within_three_percent_of_what_is_counted(kind, name, wanted):
    decoder = twin(hf_model(kind, **WIDE | {"num_hidden_layers": 8}))
    if name is not None:
        spec = replace(decoder.spec, quantization=QuantizationSpec(format=FORMATS[name], packed=True))
        packed = pack_params(spec, {n: p.detach() for n, p in decoder.named_parameters()}, torch.float32)
        decoder = Decoder(spec, device="meta", dtype=torch.float32)
        decoder.load_state_dict(packed, assign=True)
    decoder.requires_grad_(False)
    lora = lora_for(decoder.spec, wanted=wanted)
    adapters = filled(lora)
    (adapters.attach if name is None else adapters.attach_beside)(decoder)
    factors = 0 if name is None else 4 * lora.num_parameters  # as the layers multiply them
    kept = kept_bytes(decoder, adapters.parameters.values())
    assert counted_bytes(decoder.spec, lora) + factors == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("form", [{}, {"shared_outer": True}, {"use_dora": True}, {"dropout": 0.1}], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "gpt-oss"])
def test_every_form_of_adapters_keeps_what_is_counted(kind, form):
    decoder = twin(hf_model(kind, **BLOCKS)).requires_grad_(False)
    wanted = "all-linear" if "use_dora" in form or "dropout" in form else "*"
    lora = replace(lora_for(decoder.spec, wanted=wanted), **form)
    adapters = filled(lora)
    adapters.attach(decoder)
    kept = kept_bytes(decoder, adapters.parameters.values())
    assert counted_bytes(decoder.spec, lora) == pytest.approx(kept, rel=0.05 if lora.dropout else 0.03)


def test_recurrent_layers_are_counted_in_the_chunks_they_are_computed_in():
    assert max(chunked_scan._SIZES) == CHUNK


def test_cached_positions_are_those_of_the_kernels():
    assert rope._MAX_CACHED_POSITIONS_ON_GPU == activations.MAX_CACHED_POSITIONS


def test_the_logits_held_at_once_are_those_the_trainer_makes_at_once():
    assert {False: logprobs._CHUNK_ELEMENTS["cpu"], True: logprobs._CHUNK_ELEMENTS["cuda"]} == activations._CHUNK_LOGITS
