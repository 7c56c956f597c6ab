"""Small transformers models of architectures without a native spec, each with a feature the others lack."""

import torch
import transformers

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
WINDOWS = {
    "sliding_window": 9,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
CORRECTED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}

STREAMS = {
    "num_hidden_layers": 4,
    "intermediate_size": [48] * 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "pad_token_id": 0,
}

KINDS = {
    "windows, norms after each part and over all heads": ("Olmo3", WINDOWS),
    "experts": ("Olmoe", EXPERTS),
    "factors everywhere": (
        "Granite",
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4},
    ),
    "side by side, layers without positions, a logit scale": ("Cohere2", WINDOWS | {"logit_scale": 0.3}),
    "biases and means in norms": ("Starcoder2", {"sliding_window": None}),
    "part of a head turns": ("StableLm", {"partial_rotary_factor": 0.5}),
    "sinks": ("GraniteSWA", WINDOWS),
    "bounded logits": ("NanoChat", {}),
    "values shorter than keys": ("MiniCPM3", LATENT | {"num_key_value_heads": 4}),
    "a buffer that steers the router": (
        "Dots1",
        CORRECTED | {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "several streams, shared keys and values, embeddings of each layer": ("Gemma3n", STREAMS),
}
LENGTHS = (23, 1, 40, 7)


def made(name, **own):
    """A transformers model whose weights are far from their tame initial values."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3n" else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config(**(SMALL | own)))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name in model.state_dict():
                buffer.copy_(0.3 * torch.randn_like(buffer))
    return model.eval()
