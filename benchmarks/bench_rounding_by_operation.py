"""Train/inference mismatch by operation: log-probs of sampled tokens, one operation rounded in another way.

    python benchmarks/bench_rounding_by_operation.py MODEL [--device cuda] [--prompts 16] [--tokens 40]

Two programs that compute a model in bfloat16 agree in every formula, and differ in the order in which an operation
sums. Tokens are sampled from MODEL (Llama layers: SmolLM2, Llama 3) in float32. Their log-probs are computed twice:
with torch's operations in bfloat16, and with those named computed in float32 and rounded to bfloat16 once. The limit is
the first row, in which nothing differs. In the second column both sides keep the residual stream in float32.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

# Names of the matrix multiplications in a layer, and of attention.
QKV, OUTPUT, GATE_UP, DOWN, ATTENTION = "qkv", "output", "gate and up", "down", "attention"
OPERATIONS = (ATTENTION, QKV, OUTPUT, GATE_UP, DOWN)


def linear(x: Tensor, module: nn.Linear, *, other: bool) -> Tensor:
    """Return the product in the dtype of the weight; ``other`` sums it in float32 and rounds once."""
    if other:
        return F.linear(x.float(), module.weight.float()).to(module.weight.dtype)
    return F.linear(x.to(module.weight.dtype), module.weight)


def attend(q: Tensor, k: Tensor, v: Tensor, *, other: bool) -> Tensor:
    """Return causal attention; ``other`` computes it in float32 and rounds once."""
    if other:
        q, k, v = q.float(), k.float(), v.float()
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@torch.inference_mode()
def compute_logprobs(model: Any, tokens: Tensor, switched: Collection[tuple[int, str]], *, wide: bool) -> Tensor:
    """Return the log-prob of each token but the first; operations in ``switched`` (layer, name) are the other ones."""
    base, dtype = model.model, model.lm_head.weight.dtype
    hidden = base.embed_tokens(tokens)
    if wide:
        hidden = hidden.float()
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    cos, sin = base.rotary_emb(hidden.to(dtype), positions)
    for number, layer in enumerate(base.layers):

        def is_other(name: str, number: int = number) -> bool:
            return (number, name) in switched

        own, mlp = layer.self_attn, layer.mlp
        x = layer.input_layernorm(hidden).to(dtype)
        q, k, v = (
            linear(x, each, other=is_other(QKV)).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
            for each in (own.q_proj, own.k_proj, own.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = attend(q, k, v, other=is_other(ATTENTION)).to(dtype).transpose(1, 2).flatten(2)
        hidden = hidden + linear(out, own.o_proj, other=is_other(OUTPUT))
        x = layer.post_attention_layernorm(hidden).to(dtype)
        gate, up = (linear(x, each, other=is_other(GATE_UP)) for each in (mlp.gate_proj, mlp.up_proj))
        hidden = hidden + linear(F.silu(gate) * up, mlp.down_proj, other=is_other(DOWN))
    logits = F.linear(base.norm(hidden).to(dtype), model.lm_head.weight)[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def sample(model: Any, tokenizer: Any, prompts: int, tokens: int, device: str) -> list[tuple[Tensor, int]]:
    """Return sampled sequences and the length of each prompt."""
    rng = random.Random(0)
    torch.manual_seed(0)
    found: list[tuple[Tensor, int]] = []
    for _ in range(prompts):
        a, b, sign = rng.randint(10, 99), rng.randint(10, 99), rng.choice("+-")
        text = [{"role": "user", "content": f"What is {a} {sign} {b}? Think step by step."}]
        ids = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        prompt = ids["input_ids"].to(device)
        whole = model.generate(
            prompt, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, min_new_tokens=tokens
        )
        found.append((whole, prompt.shape[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    wide_model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    sequences = sample(wide_model, tokenizer, args.prompts, args.tokens, args.device)
    model = wide_model.to(torch.bfloat16)
    last = len(model.model.layers) - 1
    layers = range(last + 1)
    cases: dict[str, set[tuple[int, str]]] = {
        "none": set(),
        "all": {(n, name) for n in layers for name in OPERATIONS},
    }
    cases |= {name: {(n, name) for n in layers} for name in OPERATIONS}
    cases |= {f"attention of layer {n}": {(n, ATTENTION)} for n in (0, last // 2 + 1, last)}
    print(f"{'operation':26} {'bfloat16 residual':>18} {'float32 residual':>18}")

    def compute(switched: Collection[tuple[int, str]], *, wide: bool) -> Tensor:
        parts = [compute_logprobs(model, s, switched, wide=wide)[:, n - 1 :] for s, n in sequences]
        return torch.cat([part.flatten() for part in parts])

    plain = {wide: compute((), wide=wide) for wide in (False, True)}
    for name, switched in cases.items():
        narrow, wide = ((compute(switched, wide=w) - plain[w]).abs().mean().item() for w in (False, True))
        print(f"{name:26} {narrow:18.4f} {wide:18.4f}", flush=True)


if __name__ == "__main__":
    main()
