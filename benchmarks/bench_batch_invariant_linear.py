"""Batch-invariant GEMMs on a GPU: bitwise equality of all variants, then their time against cuBLAS.

    PYTHONPATH=src python benchmarks/bench_batch_invariant_linear.py [--only bits,dense,experts,head]

Weights rotate through more copies than the L2 cache holds; the limit is reading a weight once at 4.4 TB/s. Rows that
begin with "info" are not required: they say whether other GEMMs, and other tensor-core instructions, would give the
same bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.batch_invariant.grouped_gemm import combine_choices, grouped_linear
from miles.kernels.batch_invariant.linear import gated_linear, linear
from miles.kernels.batch_invariant.linear_triton import GemmTile, launch_gemm, list_tiles
from miles.kernels.batch_invariant.logprob import compute_logits, compute_logprob_stats
from miles.kernels.batch_invariant.sampling import sample_tokens
from miles.kernels.fused import gemv
from miles.kernels.moe.fused_moe import moe_forward
from miles.kernels.moe.grouped_gemm import sort_rows_by_group
from miles.kernels.numerics import BATCH_INVARIANT, FAST, Numerics

DEVICE = torch.device("cuda")
BANDWIDTH, CACHE = 4.4e12, 160 << 20
# inputs, outputs
LAYERS = {
    "0.6B qkv": (1024, 4096),
    "0.6B down": (3072, 1024),
    "4B qkv": (2560, 6144),
    "4B o": (4096, 2560),
    "4B gate_up": (2560, 19456),
    "4B down": (9728, 2560),
    "30B router": (2048, 128),
}
ODD = {"odd inputs": (1000, 520), "few inputs": (40, 72), "unaligned": (2562, 100)}
COUNTS = (1, 3, 17, 64, 200, 1000, 8192)
EXPERTS, CHOICES, WIDTH, SIZE = 128, 8, 2048, 768
VOCABULARY = 151936
grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
Run = Callable[[int], object]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).mul_(scale).to(dtype)


def fmt_same(same: bool) -> str:
    return "same" if same else "DIFFERS"


# -- bits -------------------------------------------------------------------------------------


def rows_alike(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> bool:
    """Whether rows come out alike in any number, at any place, beside any others."""
    whole_TN, alike = linear(x_TK, weight_NK, bias_N), True
    for count in COUNTS:
        for first in {0, min(5, len(x_TK) - count), len(x_TK) - count}:
            part_TN = linear(x_TK[first : first + count], weight_NK, bias_N)
            alike &= torch.equal(part_TN, whole_TN[first : first + count])
        others_TK = 100 * torch.randn_like(x_TK[:count])
        others_TK[count // 2] = x_TK[7]
        alike &= torch.equal(linear(others_TK, weight_NK, bias_N)[count // 2], whole_TN[7])
    return alike


def wide_product(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """The library's, in float32."""
    if x_TK.dtype == torch.float32:
        return torch.mm(x_TK, weight_NK.T)
    return torch.mm(x_TK, weight_NK.T, out_dtype=torch.float32)


def errors(x_TK: Tensor, weight_NK: Tensor) -> tuple[float, float]:
    """How far ours and the library's are from float64, in float32 and over the norm."""
    exact_TN = x_TK[:256].double() @ weight_NK.double().T
    ours_TN = launch_gemm(x_TK[:256], weight_NK[None], None, None, torch.float32)
    theirs_TN = wide_product(x_TK[:256], weight_NK)
    return tuple(float((out.double() - exact_TN).norm() / exact_TN.norm()) for out in (ours_TN, theirs_TN))  # pyright: ignore[reportReturnType]


def dense_bits() -> None:
    print(f"{'bits':14} {'rows':>8} {'tiles':>8} {'graph':>8} {'error':>9} {'library':>9}")
    cases = [(name, torch.bfloat16, shape) for name, shape in {**LAYERS, **ODD}.items()]
    cases += [("float16", torch.float16, (2560, 2560)), ("float32", torch.float32, (2560, 2560))]
    for name, dtype, (inputs, outputs) in cases:
        x_TK, weight_NK = normal(8192, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype, scale=0.05)
        bias_N = normal(outputs, dtype=dtype) if outputs == 6144 else None
        rows = rows_alike(x_TK, weight_NK, bias_N)
        wanted_TN, alike = launch_gemm(x_TK[:300], weight_NK[None], None, None, torch.float32), True
        # All tiles once, and some of them elsewhere: compiling takes most of the time.
        some = list_tiles() if name in LAYERS else list_tiles()[::3]
        for tile in some if dtype != torch.float32 else []:
            if not tile.tma or inputs % 8 == 0:
                found_TN = launch_gemm(x_TK[:300], weight_NK[None], None, None, torch.float32, tile)
                alike &= torch.equal(found_TN, wanted_TN)
        linear(x_TK[:17], weight_NK, bias_N)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            replayed_TN = linear(x_TK[:17], weight_NK, bias_N)
        captured.replay()
        graph = torch.equal(replayed_TN, linear(x_TK, weight_NK, bias_N)[:17])
        ours, theirs = errors(x_TK, weight_NK)
        print(
            f"{name:14} {fmt_same(rows):>8} {fmt_same(alike):>8} {fmt_same(graph):>8} {ours:9.2e} {theirs:9.2e}",
            flush=True,
        )


def instruction_bits() -> None:
    """Whether the narrow instruction, or a product with its sides exchanged, would give the same."""
    for name in ("4B qkv", "4B down"):
        inputs, outputs = LAYERS[name]
        x_TK, weight_NK = normal(128, inputs), normal(outputs, inputs, scale=0.05)
        wanted_TN = launch_gemm(x_TK, weight_NK[None], None, None, torch.float32)
        narrow_TN = launch_gemm(x_TK, weight_NK[None], None, None, torch.float32, GemmTile(32, 64, 64, 4, 3))
        turned_NT = launch_gemm(weight_NK, x_TK[None], None, None, torch.float32, GemmTile(64, 64, 64, 4, 3))
        library_TN = wide_product(x_TK, weight_NK)
        for what, found_TN in (("narrow", narrow_TN), ("turned", turned_NT.T), ("library", library_TN)):
            share = float((found_TN != wanted_TN).double().mean())
            print(f"info {name:10} {what:8} {share:9.2%} of the outputs differ")


@contextmanager
def unsplit(allowed: bool = False) -> Iterator[None]:
    """The library that can be forbidden to split a product's inputs, and, unless ``allowed``, forbidden it."""
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, allowed)
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = True
        torch.backends.cuda.preferred_blas_library(before)


def library_bits() -> None:
    """Where the libraries' own products are the same: as they are, cublaslt alone, and forbidden to split inputs."""
    counts = (1, 16, 64, 192, 512, 1000, 1024, 2048, 3000, 4096, 8192)
    print("info library, lt, lt unsplit: = same, d differs", *counts)
    for name, (inputs, outputs) in LAYERS.items():
        x_TK, weight_NK = normal(8192, inputs), normal(outputs, inputs, scale=0.05)
        wanted_TN, marks = linear(x_TK, weight_NK), dict.fromkeys(counts, "")
        for context in (nullcontext(), unsplit(True), unsplit()):
            with context:
                for count in counts:
                    marks[count] += "d="[torch.equal(F.linear(x_TK[:count], weight_NK), wanted_TN[:count])]
        print(f"info {name:14}", *marks.values(), flush=True)
    for inputs, outputs in ((WIDTH, 2 * SIZE), (SIZE, WIDTH)):
        weight_ENK = normal(EXPERTS, outputs, inputs, scale=0.05)
        for tokens in (1, 64, 1024, 8192):
            experts_Tk = torch.rand(tokens, EXPERTS, device=DEVICE).topk(CHOICES).indices
            rows, x_RK = sort_rows_by_group(experts_Tk, EXPERTS), normal(tokens * CHOICES, inputs)
            theirs_RN = grouped_mm(x_RK, weight_ENK.transpose(1, 2), offs=rows.ends_E)
            same = torch.equal(theirs_RN, grouped_linear(x_RK, weight_ENK, rows))
            print(f"info grouped_mm of {inputs} inputs, {tokens:5} tokens", fmt_same(same), flush=True)


def gate_bits() -> None:
    """Rows gated by the product itself, against those gated after it."""
    x_TK, weight_NK = normal(300, 2560), normal(2 * 9728, 2560, scale=0.05)
    for kind in ("silu", "gelu_tanh", "swiglu_clamped"):
        whole_TI = gated_linear(x_TK, weight_NK, None, kind)
        same = all(torch.equal(gated_linear(x_TK[:n], weight_NK, None, kind), whole_TI[:n]) for n in (1, 16, 17, 64))
        print(f"gated {kind:16} {fmt_same(same):>8}", flush=True)


def mixture(tokens: int, first_EFD: Tensor, down_EDI: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """A mixture of experts in exact arithmetic, and as the engine's fast kernels have it."""
    x_TD, experts_Tk = normal(tokens, WIDTH), torch.rand(tokens, EXPERTS, device=DEVICE).topk(CHOICES).indices
    weights_Tk = torch.rand(tokens, CHOICES, device=DEVICE).bfloat16()

    def run(numerics: Numerics) -> Tensor:
        with torch.inference_mode():
            return moe_forward(x_TD, weights_Tk, experts_Tk, first_EFD, down_EDI, activation="silu", numerics=numerics)

    return partial(run, BATCH_INVARIANT), partial(run, FAST)


def mixture_rows() -> None:
    """The whole mixture: whether the fast kernels' bits are the exact ones, and both times."""
    first_EFD, down_EDI = normal(EXPERTS, 2 * SIZE, WIDTH, scale=0.05), normal(EXPERTS, WIDTH, SIZE, scale=0.05)
    print(f"\n{'mixture, us':14} {'tokens':>6} {'exact':>8} {'fast':>8} {'ratio':>6}   info: fast kernels' bits")
    for tokens in (1, 4, 16, 64, 256, 1024):
        ours, theirs = mixture(tokens, first_EFD, down_EDI)
        same = torch.equal(ours(), theirs())
        one, other = (seconds(lambda _, run=run: run(), 1) for run in (ours, theirs))
        print(
            f"{'':14} {tokens:6} {1e6 * one:8.1f} {1e6 * other:8.1f} {one / other:6.2f}   {fmt_same(same)}",
            flush=True,
        )


def expert_bits() -> None:
    weight_ENK = normal(EXPERTS, 2 * SIZE, WIDTH, scale=0.05)
    for tokens in (1, 5, 64, 700, 4096):
        x_TK, experts_Tk = normal(tokens, WIDTH), torch.rand(tokens, EXPERTS, device=DEVICE).topk(CHOICES).indices
        rows = sort_rows_by_group(experts_Tk, EXPERTS)
        x_RK = x_TK[rows.order_R // CHOICES]
        found_RN, alike = grouped_linear(x_RK, weight_ENK, rows), True
        for group in rows.group_R.unique()[:: max(1, tokens // 100)].tolist():
            mine_R = rows.group_R == group
            alike &= torch.equal(linear(x_RK[mine_R], weight_ENK[group]), found_RN[mine_R])
        weights_Tk = torch.rand(tokens, CHOICES, device=DEVICE).bfloat16()
        x_TkD = found_RN[rows.place_R].unflatten(0, (tokens, CHOICES))
        sums = torch.equal(combine_choices(x_TkD, weights_Tk)[:1], combine_choices(x_TkD[:1], weights_Tk[:1]))
        print(f"experts, {tokens:5} tokens {fmt_same(alike):>8}   sums {fmt_same(sums):>8}", flush=True)


def head_bits() -> None:
    hidden_RD, head_VD = normal(300, 2560), normal(VOCABULARY, 2560, scale=0.03)
    logits_RV = compute_logits(hidden_RD, head_VD)
    heat_R = torch.rand(300, device=DEVICE) + 0.3
    few_BV, heat_B = compute_logits(hidden_RD[40:57], head_VD), heat_R[40:57].contiguous()
    tokens_B, logprobs_B = torch.empty(17, dtype=torch.int64, device=DEVICE), torch.empty(17, device=DEVICE)
    off = {"top_k_B": torch.zeros(17, dtype=torch.int64, device=DEVICE), "top_p_B": torch.ones(17, device=DEVICE)}
    sample_tokens(
        *(few_BV, heat_B, torch.rand(17, device=DEVICE)),
        **off,
        min_p_B=torch.zeros(17, device=DEVICE),
        filters=False,
        tokens_out_B=tokens_B,
        logprobs_out_B=logprobs_B,
    )
    targets_R = torch.zeros(300, dtype=torch.int64, device=DEVICE)
    targets_R[40:57] = tokens_B
    scores = compute_logprob_stats(logits_RV, targets_R, heat_R)
    wanted_R = (logits_RV.double() / heat_R[:, None]).log_softmax(-1).gather(1, targets_R[:, None])[:, 0]
    same = torch.equal(scores.logp_R[40:57], logprobs_B)
    print(f"head, drawn against scored {fmt_same(same):>8}   error {float((scores.logp_R - wanted_R).abs().max()):.1e}")


# -- time -------------------------------------------------------------------------------------


def seconds(run: Run, copies: int, budget: float = 0.008) -> float:
    """The median time of one run, of several in a row, in a graph."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for index in range(2):
        begin.record()
        run(index % copies)
        end.record()
    end.synchronize()
    repeats = max(copies, min(40, int(budget / max(begin.elapsed_time(end) / 1e3, 1e-5))), 1)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for index in range(repeats):
            run(index % copies)
    times: list[float] = []
    for _ in range(4):
        begin.record()
        captured.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times[1:])


def dense_times() -> None:
    slim = partial(gemv.linear, numerics=FAST)
    heads = ("rows", "ours", "library", "ratio", "slim", "unsplit", "floor", "TFLOP/s")
    print(f"\n{'time, us':14} " + " ".join(f"{head:>8}" for head in heads))
    for name, (inputs, outputs) in LAYERS.items():
        copies = max(1, min(24, CACHE // (2 * inputs * outputs)))
        weights = [normal(outputs, inputs, scale=0.05) for _ in range(copies)]
        for count in (1, 16, 64, 256, 1024, 8192):
            x_TK = normal(count, inputs)
            ours = seconds(lambda index, x=x_TK, w=weights: linear(x, w[index]), copies)
            theirs = seconds(lambda index, x=x_TK, w=weights: F.linear(x, w[index]), copies)
            one = other = ""
            if count == 1:
                with torch.inference_mode():
                    one = f"{1e6 * seconds(lambda index, x=x_TK, w=weights: slim(x, w[index]), copies):.1f}"
            elif count >= 1024:
                with unsplit():
                    other = f"{1e6 * seconds(lambda index, x=x_TK, w=weights: F.linear(x, w[index]), copies):.1f}"
            floor, rate = 2e6 * inputs * outputs / BANDWIDTH, 2e-12 * count * inputs * outputs / ours
            numbers = f"{1e6 * ours:8.1f} {1e6 * theirs:8.1f} {ours / theirs:8.2f} {one:>8} {other:>8}"
            print(f"{name:14} {count:8} {numbers} {floor:8.1f} {rate:8.0f}", flush=True)


def expert_times() -> None:
    print(f"\n{'experts, us':14} {'tokens':>6} {'ours':>8} {'library':>8} {'ratio':>6} {'floor':>7}")
    for what, (inputs, outputs) in {"first": (WIDTH, 2 * SIZE), "down": (SIZE, WIDTH)}.items():
        weight_ENK = normal(EXPERTS, outputs, inputs, scale=0.05)
        for tokens in (1, 16, 64, 256, 1024, 8192):
            experts_Tk = torch.rand(tokens, EXPERTS, device=DEVICE).topk(CHOICES).indices
            rows = sort_rows_by_group(experts_Tk, EXPERTS)
            x_RK = normal(tokens * CHOICES, inputs)
            turned_EKN = weight_ENK.transpose(1, 2)
            ours = seconds(lambda _, x=x_RK, r=rows, w=weight_ENK: grouped_linear(x, w, r), 1)
            theirs = seconds(lambda _, x=x_RK, r=rows, w=turned_EKN: grouped_mm(x, w, offs=r.ends_E), 1)
            floor = 2e6 * inputs * outputs * len(experts_Tk.unique()) / BANDWIDTH
            print(
                f"{what:14} {tokens:6} {1e6 * ours:8.1f} {1e6 * theirs:8.1f} {ours / theirs:6.2f} {floor:7.1f}",
                flush=True,
            )


def head_times() -> None:
    head_VD = normal(VOCABULARY, 2560, scale=0.03)
    print(f"\n{'head, us':14} {'rows':>5} {'ours':>8} {'library':>8} {'ratio':>6} {'floor':>7} {'scores':>7}")
    for count in (1, 16, 64, 1024):
        hidden_RD = normal(count, 2560)
        targets_R = torch.zeros(count, dtype=torch.int64, device=DEVICE)
        logits_RV = compute_logits(hidden_RD, head_VD)
        ours = seconds(lambda _, h=hidden_RD: compute_logits(h, head_VD), 1)
        theirs = seconds(lambda _, h=hidden_RD: wide_product(h, head_VD), 1)
        scores = seconds(lambda _, x=logits_RV, t=targets_R: compute_logprob_stats(x, t, 0.7), 1)
        floor = 2e6 * head_VD.numel() / BANDWIDTH
        numbers = f"{1e6 * ours:8.1f} {1e6 * theirs:8.1f} {ours / theirs:6.2f} {floor:7.1f} {1e6 * scores:7.1f}"
        print(f"{'4B':14} {count:5} {numbers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bits,dense,experts,head")
    given = parser.parse_args()
    wanted, began = given.only.split(","), time.perf_counter()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    parts: dict[str, tuple[Callable[[], None], ...]] = {
        "bits": (dense_bits, gate_bits, expert_bits, head_bits, library_bits, instruction_bits),
        "dense": (dense_times,),
        "experts": (mixture_rows, expert_times),
        "head": (head_times,),
    }
    for name in wanted:
        for part in parts[name]:
            try:
                with torch.no_grad():
                    part()
            except Exception:
                # What fails is told, and keeps nothing else from being told.
                traceback.print_exc()
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
