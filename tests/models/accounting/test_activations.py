"""What a step is said to keep for its backward pass, against what autograd keeps."""

from dataclasses import replace

import pytest
import torch
from tests.models.oracle import KINDS, hf_model, positions_of, tokens_of, twin

from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.linear_attention import chunked_scan
from miles.models.accounting import activations
from miles.models.accounting.activations import layer_bytes
from miles.models.accounting.params import CHUNK
from miles.models.decoder import Decoder
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.train import logprobs

LENGTHS = (60, 60)


def kept_bytes(decoder: Decoder) -> int:
    """All storage autograd holds after a forward, weights aside."""
    own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    held: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.cat(tokens_of(LENGTHS, vocab=decoder.spec.vocab_size))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(tokens, positions_of(LENGTHS), VarlenAttentionBackend(LENGTHS, "cpu"))
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_keep_what_they_are_said_to_keep(kind):
    decoder = twin(hf_model(kind))
    spec = decoder.spec
    said = sum(layer_bytes(spec, layer, size=4, fused=False) for layer in spec.layers) * sum(LENGTHS)
    ends = (3 * spec.hidden_size * 4 + 8) * sum(LENGTHS)  # the final norm, and the tokens
    assert said + ends == pytest.approx(kept_bytes(decoder), rel=0.1)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "qwen2 moe", "gpt-oss", "glm4"])
@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("experts_only", [False, True])
def test_quantized_layers_keep_what_they_are_said_to_keep(kind, name, experts_only):
    decoder = twin(hf_model(kind, hidden_size=128))
    if experts_only and decoder.spec.moe is None:
        return
    before, kept = decoder.spec, kept_bytes(decoder)
    quantization = QuantizationSpec(format=FORMATS[name], packed=False, experts_only=experts_only)
    params = decoder.state_dict()
    decoder = Decoder(replace(before, quantization=quantization), device="cpu", dtype=torch.float32)
    decoder.load_state_dict(params)

    def said(spec):
        return sum(layer_bytes(spec, layer, size=4, fused=False) for layer in spec.layers) * sum(LENGTHS)

    change = kept_bytes(decoder) - kept
    assert said(decoder.spec) - said(before) == pytest.approx(change, abs=0.03 * kept)
    assert (change == 0) == (name == "int8")


def test_recurrent_layers_are_counted_in_the_chunks_they_are_computed_in():
    assert max(chunked_scan._SIZES) == CHUNK


def test_the_logits_held_at_once_are_those_the_trainer_makes_at_once():
    assert {False: logprobs._CHUNK_ELEMENTS["cpu"], True: logprobs._CHUNK_ELEMENTS["cuda"]} == activations._LOGITS
