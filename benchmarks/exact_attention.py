"""Exact attention on one accelerator: whether all its forms agree to the last bit, and what that costs.

    PYTHONPATH=src python benchmarks/exact_attention.py            # bits, then times
    PYTHONPATH=src python benchmarks/exact_attention.py --tune forward,backward,decode    # tries tiles and stages

Bits: one sequence packed alone, packed beside others, prefilled in chunks over pages, and decoded token by token beside
mates, with its prefix read for several rows at once or not; "gradient" is the largest error of dq, dk, dv against
torch in double precision, relative to their norms. Times: bf16, the median of replays with a cold cache of the card.
"fast" is what the engine and trainer use otherwise; products are those of causal attention.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from kernels_attention import Decode, Prefill, attempt, milliseconds
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles.kernels.cache import KvShape, PagedCache
from miles.kernels.exact import attention_tables as tables
from miles.kernels.exact.attention import Asked
from miles.kernels.exact.attention_backward import train_backward
from miles.kernels.exact.attention_paged import decode_attention, prefill_attention
from miles.kernels.exact.attention_plain import plain_attention, plain_backward
from miles.kernels.exact.attention_spans import packed_spans
from miles.kernels.exact.attention_tables import Back, Tile
from miles.kernels.exact.attention_train import train_attention
from miles.kernels.exact.attention_work import ChunkWork
from miles.kernels.exact.packed import packed_attention
from miles.kernels.exact.paged import ExactPagedAttend
from miles.kernels.prefill import prefill_tiles
from miles.kernels.terms import Terms
from miles.kernels.varlen import varlen_kernel

DEVICE, BF16, PAGE = torch.device("cuda"), torch.bfloat16, 16
SMS = 132


class Shape(NamedTuple):
    heads: int
    groups: int
    d: int
    e: int


def tell(line: Callable[[], str]) -> str:
    """A line, or what kept it from being written: the others are to be read nevertheless."""
    try:
        return line()
    except Exception:
        return traceback.format_exc(limit=-6)


# -- bits -----------------------------------------------------------------------------------

CASES: list[tuple[Shape, torch.dtype, dict]] = [
    (Shape(4, 2, 128, 128), BF16, {}),
    (Shape(4, 1, 128, 128), BF16, {"window": 600}),
    (Shape(3, 1, 64, 64), BF16, {"softcap": 3.0}),
    (Shape(2, 1, 256, 256), BF16, {}),
    (Shape(2, 2, 192, 128), BF16, {}),
    (Shape(5, 1, 80, 80), torch.float16, {"chunk": 700}),
    (Shape(20, 1, 64, 64), BF16, {"window": 100, "softcap": 5.0}),
    (Shape(4, 2, 128, 128), torch.float32, {}),
    (Shape(2, 1, 80, 80), torch.float32, {"window": 600, "softcap": 4.0}),
]


class Bits:
    """One sequence in pages that lie anywhere, and in order."""

    total = 1300
    rows = (1300, 1299, 1281, 1025, 1024, 700, 641)
    short = (640, 513, 512, 511, 65, 64, 63, 1)

    def __init__(self, shape: Shape, dtype: torch.dtype, more: dict) -> None:
        generator = torch.Generator().manual_seed(shape.d + shape.heads)
        made = (
            (self.total, h, w) for h, w in ((shape.heads, shape.d), (shape.groups, shape.d), (shape.groups, shape.e))
        )
        self.q, self.k, self.v = (torch.randn(s, generator=generator).to(DEVICE, dtype) for s in made)
        self.grad = torch.randn(self.total, shape.heads, shape.e, generator=generator).to(DEVICE, dtype)
        self.sinks = torch.randn(shape.heads, generator=generator).to(DEVICE, dtype) if shape.d != 128 else None
        self.terms, self.shape = Terms(scale=shape.d**-0.5, **more), shape
        pages = -(-self.total // PAGE)
        order = np.random.default_rng(0).permutation(pages + 9)[:pages]
        self.table = torch.from_numpy(order.astype(np.int32))[None].to(DEVICE)
        place = torch.arange(self.total)
        slots = (torch.from_numpy(order)[place // PAGE] * PAGE + place % PAGE).to(DEVICE)
        self.held = [
            torch.zeros((pages + 9) * PAGE, *x.shape[1:], device=DEVICE, dtype=dtype) for x in (self.k, self.v)
        ]
        for held, x in zip(self.held, (self.k, self.v), strict=True):
            held[slots] = x

    def train(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        return train_attention(q, k, v, Asked(packed_spans(lengths)), self.terms, self.sinks)[0]

    def prefill(self, cuts: list[int]) -> Tensor:
        out, start = torch.empty(self.total, self.shape.heads, self.shape.e, device=DEVICE, dtype=self.q.dtype), 0
        for n in cuts:
            tiles = prefill_tiles(np.array([start]), np.array([n]), np.array([0]), 0)
            read = (self.q[start : start + n], *self.held, self.table, torch.from_numpy(tiles).to(DEVICE))
            out[start : start + n] = prefill_attention(*read, self.terms, page_size=PAGE, sinks_H=self.sinks)
            start += n
        return out

    def decode(self, rows: tuple[int, ...], *, shared: int, items: int = 512) -> tuple[Tensor, Tensor]:
        """What rows of these lengths see, and which tokens they are."""
        lengths, share = np.array(rows), self.shape.heads // self.shape.groups
        work = ChunkWork(len(rows), items, DEVICE, trunk_queries=64 if self.q.dtype != torch.float32 else 16)
        reach = {"window": self.terms.window, "chunk": self.terms.chunk}
        sizes = {"kv_heads": self.shape.groups, "queries_per_kv": share, "sms": SMS}
        work.fill(lengths, 0 * lengths, 0 * lengths + shared, **sizes, **reach)
        work.send()
        at = torch.from_numpy(lengths - 1).to(DEVICE)
        seats = torch.zeros(len(rows), dtype=torch.int32, device=DEVICE)
        read = (self.q[at], *self.held, self.table, seats, work, self.terms)
        return decode_attention(*read, page_size=PAGE, sinks_H=self.sinks), at

    def decoded(self, whole: Tensor) -> dict[str, bool]:
        found: dict[str, bool] = {}
        ways = {
            "decode": (self.rows + self.short, 0, 512),
            "alone": (self.rows[:1], 0, 512),
            "trunk": (self.rows, 640, 512),
            "trunk in a chunk": (self.rows, 576, 512),
            "merged": (self.rows, 0, 15),
        }
        for name, (rows, shared, items) in ways.items():
            out, at = self.decode(rows, shared=shared, items=items)
            found[name] = torch.equal(out, whole[at])
        return found

    def gradients(self) -> tuple[float, bool]:
        """The largest error, and whether a second run gives the same bits."""
        asked, read = Asked(packed_spans([self.total])), (self.q, self.k, self.v)
        out, lse = train_attention(*read, asked, self.terms, self.sinks)
        ran = [train_backward(self.grad, (*read, out, lse), asked, self.terms) for _ in range(2)]
        wide = [x.double() for x in read]
        sinks = None if self.sinks is None else self.sinks.double()
        sure, sums = plain_attention(*wide, asked.spans, self.terms, sinks)
        wanted = plain_backward(self.grad.double(), (*wide, sure, sums), asked.spans, self.terms)
        pairs = [(out, sure), *zip(ran[0][:3], wanted[:3], strict=True)]
        error = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
        return error, all(torch.equal(a, b) for a, b in zip(*ran, strict=True))

    def line(self) -> str:
        begun = time.monotonic()
        whole, n = self.train(self.q, self.k, self.v, [self.total]), self.total
        found: dict[str, bool] = {}
        three = [torch.cat((x[:77], x, x[:650])) for x in (self.q, self.k, self.v)]
        together = self.train(*three, [77, n, 650])
        found["packed"] = torch.equal(together[77 : 77 + n], whole) and torch.equal(together[77 + n :], whole[:650])
        found["prefill"] = torch.equal(self.prefill([n]), whole)
        found["chunks"] = torch.equal(self.prefill([1, 127, 400, 500, 3, n - 1031]), whole)
        found |= self.decoded(whole)
        error, again = self.gradients()
        found["backward twice"] = again
        wrong = [name for name, right in found.items() if not right]
        name = f"{tuple(self.shape)} {str(self.q.dtype)[6:]} {self.terms.window or ''} {self.terms.chunk or ''}"
        verdict = "all equal" if not wrong else "DIFFER: " + ", ".join(wrong)
        return (
            f"{name:44s} cap {self.terms.softcap}  gradient {error:.1e}  {time.monotonic() - begun:4.0f} s  {verdict}"
        )


def bits() -> None:
    with ThreadPoolExecutor(12) as pool:
        # Compilers run side by side.
        for line in pool.map(lambda case: tell(lambda: Bits(*case).line()), CASES):
            print(line, flush=True)


def processor_bits() -> str:
    """The same on the processor, of whose library of products nothing is known."""
    torch.manual_seed(0)
    wrong = 0
    for (heads, groups, d, e), dtype, length in itertools.product(
        [(4, 2, 16, 16), (3, 1, 33, 33), (2, 2, 192, 128), (2, 1, 256, 256)], [torch.float32, BF16], [130, 530]
    ):
        q, k, v = (torch.randn(length, h, w).to(dtype) for h, w in ((heads, d), (groups, d), (groups, e)))
        terms = Terms(scale=d**-0.5)
        whole = packed_attention(q, k, v, [length], terms)
        cache = PagedCache([KvShape(groups, d, e)], pages=99, page_size=8, device=torch.device("cpu"), dtype=dtype)
        pages = np.random.default_rng(0).permutation(99)[None, :70]
        start = 0
        for n in (100, 1, 1, 17, length - 119):
            attend = ExactPagedAttend(cache, np.array([start]), np.array([n]), pages, 8)
            part = slice(start, start + n)
            wrong += not torch.equal(attend(0, q[part], k[part], v[part], terms), whole[part])
            start += n
    return f"processor, {torch.get_num_threads()} threads: {'all equal' if not wrong else f'{wrong} DIFFER'}"


# -- times ----------------------------------------------------------------------------------


class Training:
    """``rows`` sequences of ``length`` tokens, packed."""

    def __init__(self, name: str, rows: int, length: int, heads: int, groups: int = 8, width: int = 128) -> None:
        self.name, self.rows, self.length, self.heads, self.width = name, rows, length, heads, width
        tokens = rows * length
        made = ((tokens, h, width) for h in (heads, groups, groups, heads))
        self.q, self.k, self.v, self.grad = (torch.randn(s, device=DEVICE, dtype=BF16) for s in made)
        self.asked, self.terms = Asked(packed_spans([length] * rows)), Terms(scale=width**-0.5)
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[Tensor, Tensor]:
        return train_attention(self.q, self.k, self.v, self.asked, self.terms, None)

    def backward(self) -> tuple[Tensor, ...]:
        return train_backward(self.grad, (self.q, self.k, self.v, self.out, self.lse), self.asked, self.terms)

    def flash_backward(self) -> tuple[Tensor, ...]:
        """Torch's own, told to be deterministic, over our results."""
        ends = torch.arange(self.rows + 1, device=DEVICE, dtype=torch.int32) * self.length
        seed = torch.zeros(2, dtype=torch.uint64, device=DEVICE)
        read = (self.grad, self.q, self.k, self.v, self.out, self.lse.T.contiguous(), ends, ends)
        told = (self.length, self.length, 0.0, True, seed, torch.empty(0, device=DEVICE))
        return torch.ops.aten._flash_attention_backward(*read, *told, scale=self.terms.scale)

    def torchs(self, cudnn: bool) -> tuple[float, float]:
        """Milliseconds of torch's forward and backward: cuDNN's over padded sequences, or the packed kernel."""
        ends = torch.arange(self.rows + 1, device=DEVICE, dtype=torch.int32) * self.length
        q, k, v, grad = self.q, self.k, self.v, self.grad
        if cudnn:
            q, k, v, grad = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q, k, v, grad))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        kernel, options = varlen_kernel()

        def forward() -> Tensor:
            if not cudnn:
                at = (ends, ends, self.length, self.length)
                return kernel(q, k, v, *at, scale=self.terms.scale, window_size=(-1, 0), **options)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.terms.scale, enable_gqa=True)

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
            + "".join(f"\n    {tell(each)}" for each in (self.flash_line, self.cudnn_line, self.sure_line))
        )

    def flash_line(self) -> str:
        forward, back = self.torchs(False)
        return f"flash    forward {forward:6.2f} backward {back:6.2f}"

    def cudnn_line(self) -> str:
        forward, back = self.torchs(True)
        return f"cuDNN    forward {forward:6.2f} backward {back:6.2f}"

    def sure_line(self) -> str:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
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

    return float(do_bench(work, warmup=10, rep=60, return_mode="median"))


class ExactDecode(Decode):
    """The rows of ``Decode``, cut into chunks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exact = ChunkWork(len(self.lengths), 2 * len(self.lengths) + 2048, DEVICE, trunk_queries=32)
        first = np.arange(len(self.lengths)) // self.family * self.family
        common = np.full(len(self.lengths), self.common if self.shared and self.family > 1 else 0)
        self.exact.fill(self.lengths, first, common, kv_heads=self.groups, queries_per_kv=self.share, sms=SMS)
        self.exact.send()

    def run_exact(self) -> Tensor:
        read = (self.q, self.k, self.v, self.pages, self.seats, self.exact, Terms(scale=self.width**-0.5))
        return decode_attention(*read, page_size=PAGE)

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
        read = (self.q, self.k, self.v, self.pages, self.tiles, Terms(scale=self.width**-0.5))
        return prefill_attention(*read, page_size=PAGE)

    def line(self, copy: float) -> str:
        fast, ours = milliseconds(self.run), milliseconds(self.run_exact)
        seen = self.rows * self.length * (self.length + 1) / 2
        rate = 4 * self.heads * self.width * seen / ours / 1e9
        line = f"{self.name:46s} exact {ours * 1e3:7.1f} us ({rate:4.0f} TFLOP/s)"
        return f"{line}  fast {fast * 1e3:7.1f} us  {ours / fast:5.2f} x"


def engine_cases() -> list[Callable[[], ExactDecode | ExactPrefill]]:
    lengths = np.random.default_rng(0).integers(200, 1900, 256)
    samples, family = np.full(256, 1536), {"family": 8, "common": 1024}
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


def tried(table: dict, key: Any, ways: Iterator[Any], run: Callable[[], object]) -> list[tuple[float, Any]]:
    before, found = table[key], []
    for way in ways:
        table[key] = way
        found.append((attempt(run), way))
    table[key] = before
    return found


def tune(only: str) -> None:
    """Try tables: of the forward, of the backward, of decode."""
    made = engine_cases()
    tiles = [Tile(m, w, s) for (m, w), s in itertools.product(((64, 4), (128, 8)), (2, 3, 4))]
    training = Training("4B: 2 x 8192", 2, 8192, 32)
    if "forward" in only:
        show("forward", tried(tables.TILES, 128, iter(tiles), training.forward))
        tiles = [tile._replace(stages=tile.stages + 2) for tile in tiles]
        show("forward over pages", tried(tables.PAGED_TILES, 128, iter(tiles), made[9]().run_exact))
    if "backward" in only:
        sizes = ((64, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 4))
        backs = [Back(m, n, w, s) for (m, n, w), s in itertools.product(sizes, (1, 2, 3))]
        show("backward over keys", tried(tables.KEYS_BACK, 128, iter(backs), training.backward))
        sizes = ((128, 64, 8), (64, 64, 4), (128, 128, 8), (64, 128, 4), (128, 32, 8))
        backs = [Back(m, n, w, s) for (m, n, w), s in itertools.product(sizes, (1, 2, 3))]
        show("backward over queries", tried(tables.QUERIES_BACK, 128, iter(backs), training.backward))
    if "decode" in only:
        kept = ((2, None), (3, 168), (4, 128), (6, 80), (5, 96))
        ways = [tables.Decode(4, s, r, most) for s, (r, most) in itertools.product((3, 4, 5), kept)]
        for case in (made[0](), made[6]()):
            show(case.name, tried(tables.DECODE, (128, 16), iter(ways), case.run_exact))
        case = made[2]()
        show(case.name, tried(tables.DECODE, (128, 32), iter(ways), case.run_exact))


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
        print(tell(processor_bits), flush=True)
    if not args.bits:
        with torch.no_grad():
            for make in engine_cases():
                print(tell(lambda make=make: make().line(math.nan)), flush=True)
        for sizes in TRAINING:
            print(tell(lambda sizes=sizes: Training(*sizes).line()), flush=True)
    print(f"{time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
