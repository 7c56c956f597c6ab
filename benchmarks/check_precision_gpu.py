"""Quantized models on a GPU against the torch reference on the CPU, and engine against trainer to the bit.

    python benchmarks/check_precision_gpu.py [FORMAT...]

For each format, a small dense and a small MoE model: hidden states of the packed decoder on the GPU against those on
the CPU (relative to their size), those of the trained decoder, and, with batch-invariant numerics, whether a token's
hidden state is the same bits in engine and trainer, alone and among others.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import Tensor

from miles.kernels.numerics import BATCH_INVARIANT, FAST, Numerics
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.packing import pack_params
from miles.models.spec import DecoderSpec
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.train.prefix_sharing import build_attention

COMMON = {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
MOE = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS = {
    "dense": {"model_type": "qwen3", **COMMON},
    "moe": {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], **COMMON, **MOE},
}


def build(spec: DecoderSpec, tensors: dict[str, Tensor], device: str, numerics: Numerics) -> Decoder:
    decoder = Decoder(spec, device="meta", dtype=torch.bfloat16, numerics=numerics)
    decoder.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, assign=True)
    return decoder


def forward(decoder: Decoder, tokens: Tensor, lengths: list[int]) -> Tensor:
    device = decoder.embedding.weight.device
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    attention = build_attention(lengths, (), device, numerics=decoder.numerics)
    return decoder(tokens.to(device), positions, attention)


def check(kind: str, name: str) -> str:
    spec = spec_from_config(MODELS[kind])
    wide = hf.init_random(spec, seed=0, device="cpu", dtype=torch.bfloat16)
    params = {key: param.detach() * (6 if param.dim() > 1 else 1) for key, param in wide.named_parameters()}
    trained = replace(spec, quantization=QuantizationSpec(format=FORMATS[name], packed=False))
    served = replace(spec, quantization=QuantizationSpec(format=FORMATS[name], packed=True))
    packed = pack_params(served, params, torch.bfloat16)
    on_gpu = pack_params(served, {key: value.cuda() for key, value in params.items()}, torch.bfloat16)
    same_bytes = all(
        torch.equal(packed[key].reshape(-1).view(torch.uint8), on_gpu[key].cpu().reshape(-1).view(torch.uint8))
        for key in packed
    )
    lengths = [37, 150, 1]
    tokens = torch.randint(0, 320, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = forward(build(served, packed, "cpu", FAST), tokens, lengths).float()
        with torch.inference_mode():
            fast = forward(build(served, packed, "cuda", FAST), tokens, lengths).float().cpu()
            exact = forward(build(served, packed, "cuda", BATCH_INVARIANT), tokens, lengths)
            alone = forward(build(served, packed, "cuda", BATCH_INVARIANT), tokens[37:187], [150])
        train = forward(build(trained, params, "cuda", FAST), tokens, lengths).float().cpu()
    exact_train = forward(build(trained, params, "cuda", BATCH_INVARIANT), tokens, lengths)
    errors = [float((each - expected).norm() / expected.norm()) for each in (fast, exact.float().cpu(), train)]
    return (
        f"{kind:6} {name:12} bytes equal {same_bytes!s:5} engine {errors[0]:.1e} exact {errors[1]:.1e} "
        f"trainer {errors[2]:.1e} engine = trainer {torch.equal(exact, exact_train)!s:5} "
        f"alone {torch.equal(exact[37:187], alone)}"
    )


def main() -> None:
    names = sys.argv[1:] or list(FORMATS)
    for name in names:
        for kind in MODELS:
            try:
                print(check(kind, name), flush=True)
            except Exception as error:
                print(kind, name, "FAILED", type(error).__name__, str(error)[:300], flush=True)


if __name__ == "__main__":
    main()
