"""Batch-invariant attention on one GPU: bitwise equality of all its kernels, and their time.

    PYTHONPATH=src python benchmarks/bench_batch_invariant_attention.py            # bits, then times
    PYTHONPATH=src python benchmarks/bench_batch_invariant_attention.py --tune forward,backward,decode

Bits: one sequence packed alone, packed with others, prefilled in chunks over pages, and decoded token by token in a
batch, with a shared prefix read once for several rows or not; "gradient" is the largest error of dq, dk, dv against
torch in float64, relative to their norms. Times: bf16, the median of graph replays with a cold L2 cache. "fast" is what
engine and trainer use otherwise; FLOPs are those of causal attention. ``--tune`` tries tiles and stages.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from batch_invariant_attention_check import BF16, DEVICE, PAGE, SMS, bits, format_or_error, processor_bits
from bench_paged_attention import Decode, Prefill, measure_or_inf, milliseconds
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles.kernels.attention.params import AttentionParams, PagedAttentionParams
from miles.kernels.attention.varlen import load_varlen_kernel
from miles.kernels.batch_invariant import attention_tile_config as tables
from miles.kernels.batch_invariant.attention import launch_backward, launch_forward
from miles.kernels.batch_invariant.attention_metadata import SpanBatch, build_packed_spans
from miles.kernels.batch_invariant.attention_paged import decode_attention, prefill_attention
from miles.kernels.batch_invariant.attention_split_kv import BatchInvariantSplitKVPlan
from miles.kernels.batch_invariant.attention_tile_config import BackwardTile, InvariantPrefillTile

# -- times ----------------------------------------------------------------------------------


class Training:
    """``rows`` sequences of ``length`` tokens, packed."""

    def __init__(self, name: str, rows: int, length: int, heads: int, groups: int = 8, width: int = 128) -> None:
        self.name, self.rows, self.length, self.heads, self.width = name, rows, length, heads, width
        tokens = rows * length
        made = ((tokens, h, width) for h in (heads, groups, groups, heads))
        self.q, self.k, self.v, self.grad = (torch.randn(s, device=DEVICE, dtype=BF16) for s in made)
        self.asked, self.params = SpanBatch(build_packed_spans([length] * rows)), AttentionParams(scale=width**-0.5)
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[Tensor, Tensor]:
        return launch_forward(self.q, self.k, self.v, self.asked, self.params, None)

    def backward(self) -> tuple[Tensor, ...]:
        return launch_backward(self.grad, (self.q, self.k, self.v, self.out, self.lse), self.asked, self.params)

    def flash_backward(self) -> tuple[Tensor, ...]:
        """Torch's own, told to be deterministic, over our results."""
        ends = torch.arange(self.rows + 1, device=DEVICE, dtype=torch.int32) * self.length
        seed = torch.zeros(2, dtype=torch.uint64, device=DEVICE)
        read = (self.grad, self.q, self.k, self.v, self.out, self.lse.T.contiguous(), ends, ends)
        reported = (self.length, self.length, 0.0, True, seed, torch.empty(0, device=DEVICE))
        return torch.ops.aten._flash_attention_backward(*read, *reported, scale=self.params.scale)

    def torchs(self, cudnn: bool) -> tuple[float, float]:
        """Milliseconds of torch's forward and backward: cuDNN's over padded sequences, or the packed kernel."""
        ends = torch.arange(self.rows + 1, device=DEVICE, dtype=torch.int32) * self.length
        q, k, v, grad = self.q, self.k, self.v, self.grad
        if cudnn:
            q, k, v, grad = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q, k, v, grad))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        kernel, options = load_varlen_kernel()

        def forward() -> Tensor:
            if not cudnn:
                at = (ends, ends, self.length, self.length)
                return kernel(q, k, v, *at, scale=self.params.scale, window_size=(-1, 0), **options)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.params.scale, enable_gqa=True)

        out = forward()
        back = plain_milliseconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        return plain_milliseconds(forward), back

    def rate(self, spent: float, products: int) -> float:
        seen = self.rows * self.length * (self.length + 1) / 2
        return products * 2 * self.heads * self.width * seen / spent / 1e9

    def line(self) -> str:
        ours = plain_milliseconds(self.forward), plain_milliseconds(self.backward)
        return (
            f"{self.name:20s} forward {ours[0]:6.2f} ms ({self.rate(ours[0], 2):4.0f} TFLOP/s)  "
            f"backward {ours[1]:6.2f} ms ({self.rate(ours[1], 5):4.0f} TFLOP/s)"
            + "".join(f"\n    {format_or_error(each)}" for each in (self.flash_line, self.cudnn_line, self.sure_line))
        )

    def flash_line(self) -> str:
        forward, back = self.torchs(False)
        return f"flash    forward {forward:6.2f} backward {back:6.2f}"

    def cudnn_line(self) -> str:
        forward, back = self.torchs(True)
        return f"cuDNN    forward {forward:6.2f} backward {back:6.2f}"

    def sure_line(self) -> str:
        torch.use_deterministic_algorithms(True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (a property of the module)
        try:
            spent = plain_milliseconds(self.flash_backward)
            ran = [self.flash_backward()[:3] for _ in range(2)]
        finally:
            torch.use_deterministic_algorithms(False)
        same = all(torch.equal(a, b) for a, b in zip(*ran, strict=True))
        pairs = zip(ran[0], self.backward()[:3], strict=True)
        apart = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
        return f"flash, deterministic, over our results: backward {spent:6.2f}, twice equal {same}, apart {apart:.1e}"


def plain_milliseconds(work: Callable[[], object]) -> float:
    from triton.testing import do_bench

    spent: Any = do_bench(work, warmup=10, rep=60, return_mode="median")
    return float(spent)


class ExactDecode(Decode):
    """The rows of ``Decode``, cut into chunks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exact = BatchInvariantSplitKVPlan(
            len(self.lengths), 2 * len(self.lengths) + 2048, DEVICE, prefix_queries=32
        )
        first = np.arange(len(self.lengths)) // self.family * self.family
        common = np.full(len(self.lengths), self.common if self.shared and self.family > 1 else 0)
        self.exact.fill(self.lengths, first, common, kv_heads=self.groups, queries_per_kv=self.share, sms=SMS)
        self.exact.copy_to_device()

    def run_exact(self) -> Tensor:
        read = (
            self.q,
            self.k,
            self.v,
            self.pages,
            self.seats,
            self.exact,
            PagedAttentionParams(PAGE, self.width**-0.5),
        )
        return decode_attention(*read)

    def line(self, copy: float) -> str:
        fast, ours = milliseconds(self.run), milliseconds(self.run_exact)
        begun = time.perf_counter()
        for more in range(20):
            self.exact.fill(self.lengths + 512 * (more % 2), self.lengths * 0, self.lengths * 0, **self.sizes())
        host = (time.perf_counter() - begun) / 20
        rate = self.read_bytes() / ours / 1e9
        return (
            f"{self.name:46s} exact {ours * 1e3:7.1f} us ({rate:5.2f} TB/s)  fast {fast * 1e3:7.1f} us  "
            f"{ours / fast:5.2f} x   cut on the host in {host * 1e6:4.0f} us"
        )

    def sizes(self) -> dict[str, int]:
        return {"kv_heads": self.groups, "queries_per_kv": self.share, "sms": SMS}


class ExactPrefill(Prefill):
    def run_exact(self) -> Tensor:
        read = (self.q, self.k, self.v, self.pages, self.tiles, PagedAttentionParams(PAGE, self.width**-0.5))
        return prefill_attention(*read)

    def line(self, copy: float) -> str:
        fast, ours = milliseconds(self.run), milliseconds(self.run_exact)
        seen = self.rows * self.length * (self.length + 1) / 2
        rate = 4 * self.heads * self.width * seen / ours / 1e9
        line = f"{self.name:46s} exact {ours * 1e3:7.1f} us ({rate:4.0f} TFLOP/s)"
        return f"{line}  fast {fast * 1e3:7.1f} us  {ours / fast:5.2f} x"


def engine_cases() -> list[Callable[[], ExactDecode | ExactPrefill]]:
    lengths = np.random.default_rng(0).integers(200, 1900, 256)
    samples = np.full(256, 1536)
    family: dict[str, Any] = {"family": 8, "common": 1024}
    return [
        lambda: ExactDecode("256 rows of 200-1900, 8 x 2 heads of 128", lengths),
        lambda: ExactDecode("256 rows of 200-1900, 8 x 4 heads of 128", lengths, share=4),
        lambda: ExactDecode("32 x 8 rows, 1024 shared + 512", samples, **family),
        lambda: ExactDecode("the same, each reading its own", samples, **family, shared=False),
        lambda: ExactDecode("32 rows of 8192", np.full(32, 8192)),
        lambda: ExactDecode("1 row of 1024", np.array([1024])),
        lambda: ExactDecode("1 row of 32768", np.array([32768])),
        lambda: ExactPrefill("8 x 1024 new tokens, 16 heads, 8 kv", 8, 1024, 16),
        lambda: ExactPrefill("8 x 1024 new tokens, 32 heads, 8 kv", 8, 1024),
        lambda: ExactPrefill("1 x 8192 new tokens, 32 heads, 8 kv", 1, 8192),
    ]


TRAINING = [
    ("0.6B: 16 x 1024", 16, 1024, 16),
    ("0.6B: 2 x 8192", 2, 8192, 16),
    ("4B: 8 x 2048", 8, 2048, 32),
    ("4B: 1 x 16384", 1, 16384, 32),
]


# -- tuning ---------------------------------------------------------------------------------


def show(name: str, found: list[tuple[float, Any]]) -> None:
    print(name, flush=True)
    for spent, tuning in sorted(found, key=lambda pair: pair[0])[:4]:
        print(f"    {spent * 1e3:9.1f} us {tuning}", flush=True)


def time_configs(table: dict, key: Any, ways: Iterator[Any], run: Callable[[], object]) -> list[tuple[float, Any]]:
    before, found = table[key], []
    for way in ways:
        table[key] = way
        found.append((measure_or_inf(run), way))
    table[key] = before
    return found


def tune(only: str) -> None:
    """Try tables: of the forward, of the backward, of decode."""
    made = engine_cases()
    tiles = [InvariantPrefillTile(m, w, s) for (m, w), s in itertools.product(((64, 4), (128, 8)), (2, 3, 4))]
    training = Training("4B: 2 x 8192", 2, 8192, 32)
    if "forward" in only:
        show("forward", time_configs(tables.PREFILL_TILES, 128, iter(tiles), training.forward))
        tiles = [tile._replace(stages=tile.stages + 2) for tile in tiles]
        show("forward over pages", time_configs(tables.PAGED_PREFILL_TILES, 128, iter(tiles), made[9]().run_exact))
    if "backward" in only:
        sizes = ((64, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 4))
        backs = [BackwardTile(m, n, w, s) for (m, n, w), s in itertools.product(sizes, (1, 2, 3))]
        show("backward over keys", time_configs(tables.DKV_TILES, 128, iter(backs), training.backward))
        sizes = ((128, 64, 8), (64, 64, 4), (128, 128, 8), (64, 128, 4), (128, 32, 8))
        backs = [BackwardTile(m, n, w, s) for (m, n, w), s in itertools.product(sizes, (1, 2, 3))]
        show("backward over queries", time_configs(tables.DQ_TILES, 128, iter(backs), training.backward))
    if "decode" in only:
        kept = ((2, None), (3, 168), (4, 128), (6, 80), (5, 96))
        ways = [tables.InvariantDecodeTuning(4, s, r, most) for s, (r, most) in itertools.product((3, 4, 5), kept)]
        for case in (made[0](), made[6]()):
            show(case.name, time_configs(tables.DECODE_TUNINGS, (128, 16), iter(ways), case.run_exact))
        case = made[2]()
        show(case.name, time_configs(tables.DECODE_TUNINGS, (128, 32), iter(ways), case.run_exact))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", default="", help="any of forward,backward,decode: try tiles, warps and stages")
    parser.add_argument("--bits", action="store_true", help="bits only")
    args = parser.parse_args()
    begun = time.monotonic()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}", flush=True)
    with torch.no_grad():
        if args.tune:
            tune(args.tune)
            return
        bits()
        print(format_or_error(processor_bits), flush=True)
    if not args.bits:
        with torch.no_grad():
            for make in engine_cases():
                print(format_or_error(lambda make=make: make().line(math.nan)), flush=True)
        for sizes in TRAINING:
            print(format_or_error(lambda sizes=sizes: Training(*sizes).line()), flush=True)
    print(f"{time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
