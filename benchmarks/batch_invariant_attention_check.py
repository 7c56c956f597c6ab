"""Bitwise checks of batch-invariant attention: the first part of ``bench_batch_invariant_attention.py``."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.kernels.attention.paged_prefill import build_prefill_tiles
from miles.kernels.attention.params import AttentionInputs, AttentionParams, PagedAttentionParams
from miles.kernels.batch_invariant.attention import launch_backward, launch_forward
from miles.kernels.batch_invariant.attention_metadata import SpanBatch, build_packed_spans
from miles.kernels.batch_invariant.attention_paged import decode_attention, prefill_attention
from miles.kernels.batch_invariant.attention_reference import reference_attention, reference_attention_backward
from miles.kernels.batch_invariant.attention_split_kv import BatchInvariantSplitKVPlan
from miles.kernels.batch_invariant.packed_attention import BatchInvariantVarlenBackend
from miles.kernels.batch_invariant.paged_attention import BatchInvariantPagedBackend
from miles.kernels.runtime.kv_cache import KvShape, PagedKVCache

DEVICE, BF16, PAGE = torch.device("cuda"), torch.bfloat16, 16
SMS = 132


class Shape(NamedTuple):
    heads: int
    groups: int
    d: int
    e: int


def format_or_error(line: Callable[[], str]) -> str:
    """A line, or what kept it from being written: the others are to be read nevertheless."""
    try:
        return line()
    except Exception:
        return traceback.format_exc(limit=-6)


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
        self.params, self.shape = AttentionParams(scale=shape.d**-0.5, **more), shape
        self.paged = PagedAttentionParams(PAGE, shape.d**-0.5, sinks_H=self.sinks, **more)
        pages = -(-self.total // PAGE)
        order = np.random.default_rng(0).permutation(pages + 9)[:pages]
        self.table = torch.from_numpy(order.astype(np.int32))[None].to(DEVICE)
        place = torch.arange(self.total)
        slots = (torch.from_numpy(order)[place // PAGE] * PAGE + place % PAGE).to(DEVICE)
        room = (pages + 9) * PAGE
        self.held = self.k.new_zeros(room, *self.k.shape[1:]), self.v.new_zeros(room, *self.v.shape[1:])
        for held, x in zip(self.held, (self.k, self.v), strict=True):
            held[slots] = x

    def train(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        return launch_forward(q, k, v, SpanBatch(build_packed_spans(lengths)), self.params, self.sinks)[0]

    def prefill(self, cuts: list[int]) -> Tensor:
        out, start = torch.empty(self.total, self.shape.heads, self.shape.e, device=DEVICE, dtype=self.q.dtype), 0
        for n in cuts:
            tiles = build_prefill_tiles(np.array([start]), np.array([n]), np.array([0]), 0)
            read = (self.q[start : start + n], *self.held, self.table, torch.from_numpy(tiles).to(DEVICE))
            out[start : start + n] = prefill_attention(*read, self.paged)
            start += n
        return out

    def decode(self, rows: tuple[int, ...], *, shared: int, items: int = 512) -> tuple[Tensor, Tensor]:
        """What rows of these lengths see, and which tokens they are."""
        lengths, share = np.array(rows), self.shape.heads // self.shape.groups
        work = BatchInvariantSplitKVPlan(
            len(rows), items, DEVICE, prefix_queries=64 if self.q.dtype != torch.float32 else 16
        )
        reach: dict[str, Any] = {"window": self.params.window, "chunk": self.params.chunk}
        sizes: dict[str, Any] = {"kv_heads": self.shape.groups, "queries_per_kv": share, "sms": SMS}
        work.fill(lengths, 0 * lengths, 0 * lengths + shared, **sizes, **reach)
        work.copy_to_device()
        at = torch.from_numpy(lengths - 1).to(DEVICE)
        seats = torch.zeros(len(rows), dtype=torch.int32, device=DEVICE)
        read = (self.q[at], *self.held, self.table, seats, work, self.paged)
        return decode_attention(*read), at

    def check_decode(self, whole: Tensor) -> dict[str, bool]:
        found: dict[str, bool] = {}
        ways = {
            "decode": (self.rows + self.short, 0, 512),
            "alone": (self.rows[:1], 0, 512),
            "prefix": (self.rows, 640, 512),
            "prefix within a chunk": (self.rows, 576, 512),
            "merged": (self.rows, 0, 15),
        }
        for name, (rows, shared, items) in ways.items():
            out, at = self.decode(rows, shared=shared, items=items)
            found[name] = torch.equal(out, whole[at])
        return found

    def gradients(self) -> tuple[float, bool]:
        """The largest error, and whether a second run gives the same bits."""
        asked, read = SpanBatch(build_packed_spans([self.total])), (self.q, self.k, self.v)
        out, lse = launch_forward(*read, asked, self.params, self.sinks)
        ran = [launch_backward(self.grad, (*read, out, lse), asked, self.params) for _ in range(2)]
        wide = (self.q.double(), self.k.double(), self.v.double())
        sinks = None if self.sinks is None else self.sinks.double()
        sure, sums = reference_attention(*wide, asked.spans, self.params, sinks)
        wanted = reference_attention_backward(self.grad.double(), (*wide, sure, sums), asked.spans, self.params)
        pairs = [(out, sure), *zip(ran[0][:3], wanted[:3], strict=True)]
        error = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
        return error, all(torch.equal(a, b) for a, b in zip(*ran, strict=True))

    def line(self) -> str:
        begun = time.monotonic()
        whole, n = self.train(self.q, self.k, self.v, [self.total]), self.total
        found: dict[str, bool] = {}
        q, k, v = (torch.cat((x[:77], x, x[:650])) for x in (self.q, self.k, self.v))
        together = self.train(q, k, v, [77, n, 650])
        found["packed"] = torch.equal(together[77 : 77 + n], whole) and torch.equal(together[77 + n :], whole[:650])
        found["prefill"] = torch.equal(self.prefill([n]), whole)
        found["chunks"] = torch.equal(self.prefill([1, 127, 400, 500, 3, n - 1031]), whole)
        found |= self.check_decode(whole)
        error, again = self.gradients()
        found["backward twice"] = again
        wrong = [name for name, right in found.items() if not right]
        name = f"{tuple(self.shape)} {str(self.q.dtype)[6:]} {self.params.window or ''} {self.params.chunk or ''}"
        verdict = "all equal" if not wrong else "DIFFER: " + ", ".join(wrong)
        return (
            f"{name:44s} cap {self.params.softcap}  gradient {error:.1e}  {time.monotonic() - begun:4.0f} s  {verdict}"
        )


def bits() -> None:
    with ThreadPoolExecutor(12) as pool:
        # Compilers run side by side.
        for line in pool.map(lambda case: format_or_error(lambda: Bits(*case).line()), CASES):
            print(line, flush=True)


def processor_bits() -> str:
    """The same on the processor, of whose library of products nothing is known."""
    torch.manual_seed(0)
    wrong = 0
    for (heads, groups, d, e), dtype, length in itertools.product(
        [(4, 2, 16, 16), (3, 1, 33, 33), (2, 2, 192, 128), (2, 1, 256, 256)], [torch.float32, BF16], [130, 530]
    ):
        q, k, v = (torch.randn(length, h, w).to(dtype) for h, w in ((heads, d), (groups, d), (groups, e)))
        terms = AttentionParams(scale=d**-0.5)
        whole = BatchInvariantVarlenBackend([length], q.device)(0, AttentionInputs(q, k, v, terms))
        cache = PagedKVCache([KvShape(groups, d, e)], pages=99, page_size=8, device=torch.device("cpu"), dtype=dtype)
        pages = np.random.default_rng(0).permutation(99)[None, :70]
        start = 0
        for n in (100, 1, 1, 17, length - 119):
            attend = BatchInvariantPagedBackend(cache, np.array([start]), np.array([n]), pages, 8)
            part = slice(start, start + n)
            wrong += not torch.equal(attend(0, AttentionInputs(q[part], k[part], v[part], terms)), whole[part])
            start += n
    return f"processor, {torch.get_num_threads()} threads: {'all equal' if not wrong else f'{wrong} DIFFER'}"
