"""Training kernels on a GPU besides the GEMMs: torch's attention backends, and our fused kernels.

    PYTHONPATH=src python benchmarks/bench_training_kernels.py
    PYTHONPATH=src python benchmarks/bench_training_kernels.py --parts operations head tiles

Forward and backward together, medians; of short operations the time of their kernels alone. Attention is in TFLOP/s of
what a causal triangle needs (3.5 forwards); the rest in microseconds beside the same operations in plain torch.

Parts: ``attention`` of long sequences, and of the short ones and shared prompts of a GRPO step; ``operations`` fused
kernels; ``head`` log-probs by chunk size; ``moe`` the permutation of tokens; ``sums`` gradients of gathered rows and
float32 gradient sums; ``optimizer`` clipping, AdamW and rounding, in one kernel and in torch's; ``tiles`` norms and
heads by the size of their tiles.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw
from torch.profiler import ProfilerActivity, profile

from miles.kernels.attention.gather_rows import sum_copies
from miles.kernels.attention.params import AttentionInputs, AttentionParams
from miles.kernels.attention.tree import Segment, TreeAttentionBackend
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.batch_invariant.packed_attention import BatchInvariantTreeBackend, BatchInvariantVarlenBackend
from miles.kernels.fused import qk_norm_rope_autograd, rms_norm_autograd
from miles.kernels.fused.activation import apply_activation, gated_activation_training
from miles.kernels.fused.adamw import AdamwParams, fused_adamw
from miles.kernels.fused.grad_sum import add_grad
from miles.kernels.fused.qk_norm_rope import QKVShape
from miles.kernels.fused.qk_norm_rope_autograd import qk_norm_rope_training
from miles.kernels.fused.rms_norm_autograd import add_rms_norm_training
from miles.kernels.moe import grouped_gemm
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


def kernel_seconds(run: Callable[[], Any], rounds: int = 5) -> float:
    """The time of a run's kernels, without what the host takes to launch them."""
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in found.key_averages()) / rounds / 1e6


def both_ways(forward: Callable[[], tuple[Tensor, ...]], measure: Callable[..., float] = seconds) -> float:
    grads = [torch.randn_like(x) for x in forward()]
    return measure(lambda: torch.autograd.backward(forward(), grads))


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


def short_attention(heads: int, kv_heads: int) -> None:
    """Packed samples of a GRPO step: 16,384 tokens in samples of 512, and of prompts of 256 shared by eight samples."""
    prompt, reply, samples = 256, 256, 8
    prompts = 16384 // (prompt + samples * reply)
    segments: list[Segment] = []
    for start in range(0, prompts * (prompt + samples * reply), prompt + samples * reply):
        segments.append(Segment(prompt, ((start, prompt),)))
        replies = range(start + prompt, start + prompt + samples * reply, reply)
        segments += [Segment(reply, ((start, prompt), (first, reply))) for first in replies]
    lengths = [prompt + reply] * (16384 // (prompt + reply))
    backends: dict[str, tuple[int, float, Any]] = {
        "packed": (sum(lengths), 512 * 512 / 2 * len(lengths), VarlenAttentionBackend(lengths, "cuda")),
        "packed, batch-invariant": (
            sum(lengths),
            512 * 512 / 2 * len(lengths),
            BatchInvariantVarlenBackend(lengths, "cuda"),
        ),
    }
    shared = (sum(s.length for s in segments), float(sum(s.length * (s.keys - s.length / 2) for s in segments)))
    backends["shared"] = (*shared, TreeAttentionBackend(segments, "cuda"))
    backends["shared, batch-invariant"] = (*shared, BatchInvariantTreeBackend(segments, "cuda"))
    params = AttentionParams(scale=DIM**-0.5)
    for name, (tokens, scores, attend) in backends.items():
        q, k, v = normal(tokens, heads, DIM), *(normal(tokens, kv_heads, DIM) for _ in range(2))

        def run(attend: Any = attend, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> tuple[Tensor, ...]:
            return (attend(0, AttentionInputs(q, k, v, params)),)

        spent = both_ways(run)
        rate = 3.5 * 4 * scores * heads * DIM / spent / 1e12
        print(
            f"| {heads}/{kv_heads} heads, {name} {tokens:,} | {1e6 * spent:,.0f} us | {rate:.0f} TFLOP/s |", flush=True
        )


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
    products = 3 * 2 * tokens * width * VOCABULARY
    for chunk in (None, 1792, 3584, 8192, tokens):
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        spent = both_ways(lambda chunk=chunk: (compute_logprobs(output, target, chunk=chunk)[0],))
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        rate = f"{products / spent / 1e12:.0f} TFLOP/s of three products, {peak:.1f} GiB"
        print(f"| log-probs, {tokens:,} x {width:,}, chunk {chunk} | {1e6 * spent:,.0f} | {rate} |", flush=True)
    logprobs.use_triton_training = lambda x: False
    spent = both_ways(lambda: (compute_logprobs(output, target)[0],))
    logprobs.use_triton_training = kernels
    print(f"| log-probs, {tokens:,} x {width:,}, torch | {1e6 * spent:,.0f} | |", flush=True)
    grad, hidden = normal(1792, VOCABULARY).detach(), normal(1792, width).detach()
    total = torch.zeros(VOCABULARY, width, device="cuda")
    ways: dict[str, Callable[[], object]] = {
        "product, torch sum": lambda: total.add_(grad.T @ hidden),
        "product, fused sum": lambda: add_grad(total, grad.T @ hidden),
        "product into the sum": lambda: torch.addmm(total, grad.T, hidden, out_dtype=torch.float32, out=total),
        "product": lambda: grad.T @ hidden,
    }
    for name, way in ways.items():
        print(f"| head gradient of 1,792 tokens x {width:,}, {name} | {1e6 * seconds(way):,.0f} | |", flush=True)


def sums() -> None:
    """The backward of the key gather of shared prompts in kernel and rounds, and float32 sums of bfloat16 gradients."""
    prompt, reply, samples = 256, 256, 8
    segments: list[Segment] = []
    for start in range(0, 7 * (prompt + samples * reply), prompt + samples * reply):
        segments.append(Segment(prompt, ((start, prompt),)))
        replies = range(start + prompt, start + prompt + samples * reply, reply)
        segments += [Segment(reply, ((start, prompt), (first, reply))) for first in replies]
    view = TreeAttentionBackend(segments, "cuda")._get_view(AttentionParams(scale=1.0))
    gather = view.get_key_gather()
    grad = normal(len(gather.row_P), 8, DIM).detach()

    def in_rounds() -> Tensor:
        total = grad.new_zeros(gather.rows, *grad.shape[1:], dtype=torch.float32)
        for slots in gather.rounds:
            total[: slots.shape[1]] += (
                grad.index_select(0, slots.flatten()).unflatten(0, slots.shape).sum(0, dtype=torch.float32)
            )
        return (total if gather.inverse_M is None else total.index_select(0, gather.inverse_M)).to(grad.dtype)

    spent = [1e6 * kernel_seconds(way) for way in (lambda: sum_copies(grad, gather), in_rounds)]
    print(f"| gradient of {gather.rows:,} rows gathered {len(grad):,} times | {spent[0]:,.0f} | {spent[1]:,.0f} |")
    for size in (1 << 21, 6 << 20, 25 << 20, 155 << 20):
        total, grad = torch.zeros(size, device="cuda"), normal(size).detach()
        ways = (lambda t=total, g=grad: add_grad(t, g), lambda t=total, g=grad: t.add_(g))
        ours, theirs = (1e6 * kernel_seconds(way) for way in ways)
        print(f"| float32 sum of {size:,} bfloat16 gradients | {ours:,.0f} | {theirs:,.0f} |", flush=True)


def optimizer(size: int = 403_000_320) -> None:
    """AdamW of bfloat16 weights with float32 masters, the gradient clipped: one kernel, and torch's three passes."""
    weight, second = normal(size).detach(), torch.full((size,), 1e-3, device="cuda")
    master, grad, first = weight.float(), torch.randn(size, device="cuda"), torch.zeros(size, device="cuda")
    scale, step = torch.tensor(0.5, device="cuda"), [torch.ones((), device="cuda")]
    params = AdamwParams(lr=1e-5, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1, step=3)
    rest: dict[str, Any] = {"fused": True, "amsgrad": False, "maximize": False, "lr": 1e-5, "weight_decay": 0.1}

    def in_torch() -> None:
        grad.mul_(scale)
        adamw([master], [grad], [first], [second], [], step, beta1=0.9, beta2=0.98, eps=1e-8, **rest)
        weight.copy_(master)

    ways = (lambda: fused_adamw(weight, master, grad, (first, second), params, scale=scale), in_torch)
    ours, theirs = (seconds(way) for way in ways)
    rates = f"{30 * size / ours / 1e12:.2f} and {46 * size / theirs / 1e12:.2f} TB/s of 30 and 46 bytes a value"
    print(f"| AdamW of {size:,} values, {rates} | {1e6 * ours:,.0f} | {1e6 * theirs:,.0f} |", flush=True)


def permutation(tokens: int = 8192, width: int = 2048, choices: int = 8, experts: int = 128) -> None:
    """Rows of experts, permuted and combined: by one kernel each way, and by gathers and matmuls."""
    rows = grouped_gemm.sort_rows_by_group(torch.rand(tokens, experts, device="cuda").topk(choices).indices, experts)
    x, sorted_x = normal(tokens, width), normal(tokens * choices, width)
    weights, kernels = normal(tokens, choices), grouped_gemm.use_triton_training
    ways: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "dispatch": lambda: (grouped_gemm.dispatch(x, rows),),
        "combine": lambda: (grouped_gemm.combine_rows(sorted_x, weights, rows),),
    }
    for name, way in ways.items():
        spent: list[float] = []
        for is_ours in (True, False):
            grouped_gemm.use_triton_training = kernels if is_ours else lambda x: False
            spent.append(1e6 * both_ways(way, kernel_seconds))
        print(f"| {name}, {tokens:,} x {width:,}, {choices} experts | {spent[0]:,.0f} | {spent[1]:,.0f} |", flush=True)
    grouped_gemm.use_triton_training = kernels


def tiles(model: str) -> None:
    """Norms and heads with other tiles; the first line of each is the one that is used."""
    ways = pairs(model)
    sweep(
        ways[next(name for name in ways if "norm" in name)][0],
        rms_norm_autograd,
        {"_TILE": (4096, 1024, 2048, 8192), "_WARP_ELEMENTS": (512, 1024, 256), "_MAX_PROGRAMS": (528, 1056, 2112)},
    )
    heads = ways[next(name for name in ways if "heads" in name)][0]
    sweep(heads, qk_norm_rope_autograd, {"_FORWARD_TILE": (4096, 2048, 1024), "_WARPS": (4, 2)})
    choices = {"_BACKWARD_TILE": (2048, 4096, 1024), "_WARPS": (4, 2), "_MAX_PROGRAMS": (1056, 2112, 4224)}
    sweep(heads, qk_norm_rope_autograd, choices)


def sweep(run: Callable[[], tuple[Tensor, ...]], module: Any, choices: dict[str, Sequence[int]]) -> None:
    names, before = list(choices), {name: getattr(module, name) for name in choices}
    found: list[tuple[float, str]] = []
    for values in itertools.product(*choices.values()):
        for name, value in zip(names, values, strict=True):
            setattr(module, name, value)
        found.append(
            (1e6 * both_ways(run, kernel_seconds), ", ".join(f"{n}={v}" for n, v in zip(names, values, strict=True)))
        )
    for name, value in before.items():
        setattr(module, name, value)
    for spent, how in [found[0], *sorted(found)[:5]]:
        print(f"| {module.__name__.rpartition('.')[2]}: {how} | {spent:,.0f} | |", flush=True)


PARTS = ("attention", "operations", "head", "moe", "sums", "optimizer", "tiles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "attention" in args.parts:
        print("\n| attention | way | |\n|---|---|--:|")
        for case in ATTENTION:
            attention(*case)
        for case in sorted({case[:2] for case in ATTENTION}):
            short_attention(*case)
    print("\n| operation | ours, us | torch, us |\n|---|--:|--:|")
    for model in args.models:
        for name, (ours, theirs) in pairs(model).items() if "operations" in args.parts else ():
            spent = [1e6 * both_ways(way, kernel_seconds) for way in (ours, theirs)]
            print(f"| {name} | {spent[0]:,.0f} | {spent[1]:,.0f} |", flush=True)
        if "head" in args.parts:
            head(model)
        if "tiles" in args.parts:
            tiles(model)
    for part, work in (("moe", permutation), ("sums", sums), ("optimizer", optimizer)):
        if part in args.parts:
            work()


if __name__ == "__main__":
    main()
