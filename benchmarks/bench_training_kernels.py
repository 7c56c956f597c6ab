"""Training kernels on a GPU besides the GEMMs: torch's attention backends, and our fused kernels.

    PYTHONPATH=src python benchmarks/bench_training_kernels.py

Forward and backward together, medians. Attention is in TFLOP/s of what a causal triangle needs (3.5 forwards); the rest
in microseconds beside the same operations in plain torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles.kernels.attention.params import AttentionInputs, AttentionParams
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.fused.activation import apply_activation, gated_activation_training
from miles.kernels.fused.qk_norm_rope import QKVShape, qk_norm_rope_training
from miles.kernels.fused.rms_norm_autograd import add_rms_norm_training
from miles.kernels.numerics import FAST
from miles.models.layers.rope import apply_rotary
from miles.train import logprobs
from miles.train.logprobs import HeadOutput, compute_logprobs

# heads, key-value heads, length of a sequence, sequences
ATTENTION = ((16, 8, 16384, 1), (16, 8, 2048, 8), (32, 8, 8192, 1), (32, 4, 8192, 1))
# tokens, hidden, heads, key-value heads, intermediate
MODELS = {"0.6B": (16384, 1024, 16, 8, 3072), "4B": (8192, 2560, 32, 8, 9728)}
VOCABULARY, DIM = 151936, 128


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def seconds(run: Callable[[], Any]) -> float:
    """The median of ten after two to warm up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(12):
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def both_ways(forward: Callable[[], tuple[Tensor, ...]]) -> float:
    grads = [torch.randn_like(x) for x in forward()]
    return seconds(lambda: torch.autograd.backward(forward(), grads))


def attention(heads: int, kv_heads: int, length: int, count: int) -> None:
    q, k, v = normal(length * count, heads, DIM), *(normal(length * count, kv_heads, DIM) for _ in range(2))
    attend, params = VarlenAttentionBackend([length] * count, "cuda"), AttentionParams(scale=DIM**-0.5)

    def square(backend: SDPBackend) -> tuple[Tensor, ...]:
        query, key, value = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return (F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),)

    ways: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "packed, as the trainer calls it": lambda: (attend(0, AttentionInputs(q, k, v, params)),),
        "sdpa, flash": lambda: square(SDPBackend.FLASH_ATTENTION),
        "sdpa, cuDNN": lambda: square(SDPBackend.CUDNN_ATTENTION),
    }
    needed = 3.5 * 2 * length * length * count * heads * DIM
    for name, way in ways.items():
        try:
            reported = f"{needed / both_ways(way) / 1e12:.0f} TFLOP/s"
        except RuntimeError as error:
            reported = str(error).splitlines()[0][:60]
        print(f"| {heads}/{kv_heads} heads, {count} x {length:,} | {name} | {reported} |", flush=True)


def pairs(model: str) -> dict[str, tuple[Callable[[], tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]]:
    """Each operation as ours and as torch's."""
    tokens, width, heads, kv_heads, inner = MODELS[model]
    x, late, weight, gates = normal(tokens, width), normal(tokens, width), normal(width), normal(tokens, 2 * inner)
    shape = QKVShape(heads=heads, kv_heads=kv_heads, head_dim=DIM)
    qkv, q_weight, k_weight = normal(tokens, shape.rows * DIM), normal(DIM), normal(DIM)
    rotation = torch.randn(tokens, 2, DIM, device="cuda", dtype=torch.bfloat16)

    def add_norm() -> tuple[Tensor, ...]:
        total = x + late
        return total, F.rms_norm(total, weight.shape, weight, 1e-6)

    def chain() -> tuple[Tensor, ...]:
        qk, v = qkv.unflatten(-1, (-1, DIM)).split((heads + kv_heads, kv_heads), dim=1)
        scale = torch.cat((q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)))
        qk = apply_rotary(F.rms_norm(qk, (DIM,), None, 1e-6) * scale, rotation, numerics=FAST)
        return *qk.split((heads, kv_heads), dim=1), v

    return {
        f"sum and norm, {tokens:,} x {width:,}": (lambda: add_rms_norm_training(x, late, weight, 1e-6), add_norm),
        f"gate, {tokens:,} x {inner:,}": (
            lambda: (gated_activation_training(gates, "silu"),),
            lambda: (apply_activation(gates[:, :inner], gates[:, inner:], "silu"),),
        ),
        f"heads, {tokens:,} x {shape.rows} x {DIM}": (
            lambda: qk_norm_rope_training(qkv, rotation, q_weight, k_weight, shape),
            chain,
        ),
    }


def head(model: str) -> None:
    tokens, width, *_ = MODELS[model]
    output = HeadOutput(hidden_RD=normal(tokens, width), head_VD=normal(VOCABULARY, width))
    target, kernels = torch.randint(0, VOCABULARY, (tokens,), device="cuda"), logprobs.use_triton_training
    spent: list[float] = []
    for ours in (True, False):
        logprobs.use_triton_training = kernels if ours else lambda x: False
        spent.append(both_ways(lambda: (compute_logprobs(output, target)[0],)))
    logprobs.use_triton_training = kernels
    products = 3 * 2 * tokens * width * VOCABULARY
    print(f"| log-probs, {tokens:,} x {width:,} x {VOCABULARY:,} | {1e6 * spent[0]:,.0f} | {1e6 * spent[1]:,.0f} |")
    print(f"| (their three products at {products / spent[0] / 1e12:.0f} TFLOP/s) | | |", flush=True)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| attention | way | |\n|---|---|--:|")
    for case in ATTENTION:
        attention(*case)
    print("\n| operation | ours, us | torch, us |\n|---|--:|--:|")
    for model in MODELS:
        for name, (ours, theirs) in pairs(model).items():
            print(f"| {name} | {1e6 * both_ways(ours):,.0f} | {1e6 * both_ways(theirs):,.0f} |", flush=True)
        head(model)


if __name__ == "__main__":
    main()
