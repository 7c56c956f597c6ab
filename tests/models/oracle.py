"""Small transformers models with random weights, and our decoders holding the same weights."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from miles.kernels.varlen import PackedAttend
from miles.models import names
from miles.models.decoder import Decoder, Routing
from miles.models.families import spec_of

SMALL = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {
    "experts_implementation": "eager",
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

KINDS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3 tied, every head its own": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen3 with biases": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "attention_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 1}),
    "qwen2 tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama 3.1": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama linear rope and biases": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen3 moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, MOE | {"norm_topk_prob": False}),
    "qwen3 moe normalised": (Qwen3MoeForCausalLM, Qwen3MoeConfig, MOE | {"norm_topk_prob": True}),
    "qwen3 moe in some layers": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
}


def hf_model(kind: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A transformers model whose weights are far from their tame initial values, so that mistakes show."""
    model, config, own = KINDS[kind]
    torch.manual_seed(seed)
    made = model(config(**(SMALL | own | changes)))
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
    return made.eval()


def assemble(spec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors out of a transformers state dict (or gradients), by the names table."""
    whole = names.stacked(spec)
    ours = {}
    for name, pieces in names.pieces(spec).items():
        if whole.get(name) in tensors:
            ours[name] = tensors[whole[name]]
            continue
        ours[name] = torch.empty(names.shape_of(pieces))
        for piece in pieces:
            piece.of(ours[name]).copy_(tensors[piece.hf_name])
    return ours


def twin(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our decoder with a transformers model's weights."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    decoder = Decoder(spec_of(config), device="cpu", dtype=dtype)
    decoder.load_state_dict(assemble(decoder.spec, model.state_dict()))
    return decoder


def tokens_of(lengths: Sequence[int], vocab: int = SMALL["vocab_size"], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def positions_of(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def hf_logits(model: PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    """Each sequence on its own, one after the other."""
    return torch.cat([model(tokens[None]).logits[0] for tokens in sequences])


def our_logits(decoder: Decoder, sequences: Sequence[Tensor], routing: Routing | None = None) -> Tensor:
    """All sequences packed, in one forward."""
    lengths = [len(tokens) for tokens in sequences]
    hidden = decoder(torch.cat(list(sequences)), positions_of(lengths), PackedAttend(lengths, "cpu"), routing)
    return hidden @ decoder.head().T


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, against the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
