"""The same decoder on a CUDA device: close to the CPU's values, never waiting for the device, capturable."""

import pytest
import torch
from tests.models.oracle import KINDS, hf_model, our_logits, positions_of, relative, tokens_of, twin

from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder

if not torch.cuda.is_available():  # without hundreds of tests that are collected to be skipped
    pytest.skip("needs a CUDA device", allow_module_level=True)

LENGTHS = [40, 3, 17, 90]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def there_too(decoder, dtype, device="cuda"):
    """The same decoder on the device; what is kept in float32 whatever the model's dtype stays so."""
    made = Decoder(decoder.spec, device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(decoder.get_parameter(name))
    return made


def forward(decoder, tokens):
    lengths = [len(t) for t in tokens]
    packed = VarlenAttentionBackend(lengths, "cuda")
    hidden = decoder(torch.cat(tokens).cuda(), positions_of(lengths).cuda(), packed)
    logits, cap = hidden.float() @ decoder.head().float().T, decoder.spec.logit_softcap
    return logits if cap is None else (logits / cap).tanh() * cap


def typical_error(found, wanted):
    """The median over tokens: what is chosen near a border (experts, tokens to look at) may be chosen otherwise."""
    return ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median().item()


def allowed_error(decoder, tokens, wanted, dtype):
    """In bfloat16 one and a half times what rounding costs the same decoder on a CPU."""
    if dtype == torch.float32:
        return 1e-4
    rounded = our_logits(there_too(decoder, dtype, "cpu"), tokens)
    return max(1.5 * typical_error(rounded.float(), wanted), 2e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_close_to_the_cpus(kind, dtype):
    decoder = twin(hf_model(kind))
    tokens = tokens_of(LENGTHS)
    wanted = our_logits(decoder, tokens)
    wanted.square().mean().backward()
    there = there_too(decoder, dtype)
    found = forward(there, tokens)
    found.float().square().mean().backward()
    assert typical_error(found.cpu().float(), wanted) <= allowed_error(decoder, tokens, wanted, dtype)
    if dtype == torch.float32:
        for name, parameter in decoder.named_parameters():
            if not parameter.requires_grad:
                continue
            assert relative(there.get_parameter(name).grad.cpu(), parameter.grad) <= 1e-3, name


@pytest.mark.parametrize("kind", ["qwen3", "llama 3.1", "qwen3 moe normalised"])
def test_a_forward_in_bfloat16_can_be_captured_and_replayed(kind):
    decoder = twin(hf_model(kind, **SIZES)).to("cuda", torch.bfloat16)
    tokens, positions = torch.zeros(8, dtype=torch.long, device="cuda"), torch.arange(8, device="cuda")
    packed = VarlenAttentionBackend([8], "cuda")
    with torch.inference_mode():
        for _ in range(2):
            decoder(tokens, positions, packed)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = decoder(tokens, positions, packed)
        tokens.copy_(torch.arange(8))
        graph.replay()
        assert torch.equal(out, decoder(tokens, positions, packed))


def test_random_weights_follow_the_seed_on_the_device():
    spec = twin(hf_model("qwen3 moe")).spec
    first, same = (hf.init_random(spec, seed=1, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
