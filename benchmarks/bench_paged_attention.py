"""Paged attention kernels on one GPU: bytes and FLOPs per second against what the GPU can do.

    PYTHONPATH=src python benchmarks/bench_paged_attention.py            # the table
    PYTHONPATH=src python benchmarks/bench_paged_attention.py --tune     # tries tiles, warps and stages for each shape
    PYTHONPATH=src python benchmarks/bench_paged_attention.py --tune-fp8 # the same over an FP8 KV cache, in two minutes

bf16, scattered pages of 16 tokens. Every time is the median of graph replays of all launches of one layer, with the L2
cache cleared before each. Bytes are those of keys and values, once for every row, or once for every shared prefix, and
of queries and outputs; "of copy" is their rate over the measured rate of a copy (which reads and writes). FLOPs are
those of causal attention; beside them torch's SDPA over unpaged tensors. "error" is relative to plain torch in float32.
"FP8" is the same over an FP8 KV cache: its time and speed-up, and for decode the bytes it reads, scales included.
``--tune-fp8`` compiles in several processes, measures every tile of ``FP8_TUNED``, and prints the best of each entry of
the tables in ``tile_config`` as a line that can be pasted there; ``--only`` limits it to some entries.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.attention import tile_config
from miles.kernels.attention.mla import (
    count_head_tiles,
    mla_decode_attention,
    mla_decode_reference,
    mla_prefill_attention,
)
from miles.kernels.attention.paged_decode import decode_attention, decode_reference
from miles.kernels.attention.paged_prefill import TILE, build_prefill_tiles, prefill_attention
from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.attention.split_kv import SplitKVPlan
from miles.kernels.attention.tile_config import PrefillTile, TileTuning
from miles.kernels.runtime.kv_cache import KVScales
from miles.precision.kv_cache import quantize_kv

PAGE = 16
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def milliseconds(work: Callable[[], object]) -> float:
    """The median of replays, with a cold cache of the card."""
    from triton.testing import do_bench

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    spent: Any = do_bench(graph.replay, warmup=5, rep=40, return_mode="median")
    return float(spent)


def copy_rate() -> float:
    """Bytes read and written in a second by a copy of 1 GiB."""
    source = torch.randn(2**28, device=DEVICE)
    target = torch.empty_like(source)
    return 8 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


def apart(out: Tensor, wanted: Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def quantized(k: Tensor, v: Tensor, value_dim: int | None) -> tuple[Tensor, Tensor, KVScales]:
    """Bytes of FP8 keys and values and their scales; of an MLA latent with ``value_dim``, one for its RoPE channels."""
    codes, scales = [], []
    for x in (k, v):
        width = x.shape[-1]
        parts = [quantize_kv(part) for part in x.split((value_dim, width - value_dim) if value_dim else (width,), -1)]
        codes.append(torch.cat([data.view(torch.uint8) for data, _ in parts], -1))
        scales.append(torch.cat([scale for _, scale in parts], -1).unflatten(0, (-1, PAGE)).mT.contiguous())
    return codes[0], codes[0] if value_dim else codes[1], KVScales(scales[0], scales[0] if value_dim else scales[1])


@dataclass
class Decode:
    """Rows of these lengths; neighbours in runs of ``family`` begin with ``common`` tokens that are the same."""

    name: str
    lengths: np.ndarray
    groups: int = 8
    share: int = 2
    width: int = 128
    family: int = 1
    common: int = 0
    prefix_queries: int = 64
    shared: bool = True
    latent: bool = False
    values: int = 128
    fp8: bool = False
    work: SplitKVPlan = field(init=False)

    def __post_init__(self) -> None:
        rng, rows = np.random.default_rng(0), len(self.lengths)
        counts = -(-self.lengths // PAGE)
        free = iter(rng.permutation(int(counts.sum())).tolist())
        pages = np.zeros((rows, int(counts.max())), np.int32)
        for row, count in enumerate(counts):
            pages[row, :count] = list(itertools.islice(free, int(count)))
        first = np.arange(rows) // self.family * self.family
        pages[:, : self.common // PAGE] = pages[first, : self.common // PAGE]
        slots = int(counts.sum()) * PAGE
        keys = (slots, self.groups, self.width)
        self.k = torch.randn(keys, device=DEVICE, dtype=BF16)
        self.v = self.k if self.latent else torch.randn(keys, device=DEVICE, dtype=BF16)
        self.params = PagedAttentionParams(PAGE, self.width**-0.5)
        if self.fp8:
            self.k, self.v, scales = quantized(self.k, self.v, self.values if self.latent else None)
            self.params = self.params._replace(kv_scales=scales)
        self.q = torch.randn(rows, self.groups * self.share, self.width, device=DEVICE, dtype=BF16)
        self.pages, self.seats = torch.from_numpy(pages).to(DEVICE), torch.arange(rows, device=DEVICE)
        self.work = SplitKVPlan(rows, max(2 * rows, 4096), DEVICE, prefix_queries=self.prefix_queries)
        self.work.fill(
            self.lengths,
            first,
            np.full(rows, self.common if self.shared and self.family > 1 else 0),
            kv_heads=count_head_tiles(self.share) if self.latent else self.groups,
            queries_per_kv=self.share,
            sms=torch.cuda.get_device_properties(DEVICE).multi_processor_count,
        )
        self.work.copy_to_device()

    def run(self) -> Tensor:
        params = self.params
        if self.latent:
            return mla_decode_attention(
                self.q, self.k, self.pages, self.seats, self.work, params, value_dim=self.values
            )
        return decode_attention(self.q, self.k, self.v, self.pages, self.seats, self.work, params)

    def error(self) -> float:
        params = self.params
        lengths = torch.from_numpy(self.lengths).to(DEVICE)
        if self.latent:
            wanted = mla_decode_reference(
                self.q, self.k, self.pages, self.seats, lengths, params, value_dim=self.values
            )
        else:
            wanted = decode_reference(self.q, self.k, self.v, self.pages, self.seats, lengths, params)
        return apart(self.run(), wanted)

    def read_bytes(self) -> int:
        lists = self.work.host_arrays()
        tokens = int(np.diff(lists.items_I[:, 3:], axis=1).sum())
        vectors = self.groups * (1 if self.latent else 2)
        ends = self.q.numel() + len(self.q) * self.q.shape[1] * (self.values if self.latent else self.width)
        scales = 4 * (2 if self.latent else vectors)
        return tokens * (vectors * self.width + scales if self.fp8 else 2 * vectors * self.width) + 2 * ends

    def line(self, copy: float) -> str:
        spent = milliseconds(self.run)
        rate = self.read_bytes() / spent * 1e3
        prefixes, suffixes = self.work.host_arrays().counts.tolist()
        return (
            f"{self.name:44s} {spent * 1e3:9.1f} us  {rate / 1e12:5.2f} TB/s  {100 * rate / copy:4.0f} % of copy  "
            f"items {prefixes:4d} + {suffixes:4d}  error {self.error():.1e}{self.fp8_column(spent)}"
        )

    def fp8_column(self, spent: float) -> str:
        """The same over an FP8 cache."""
        narrow = replace(self, fp8=True)
        took = milliseconds(narrow.run)
        rate = narrow.read_bytes() / took / 1e9
        return f"  FP8 {took * 1e3:9.1f} us ({spent / took:.2f}x)  {rate:5.2f} TB/s  error {narrow.error():.1e}"


@dataclass
class Prefill:
    """``rows`` sequences of ``length`` new tokens and nothing before."""

    name: str
    rows: int
    length: int
    heads: int = 32
    groups: int = 8
    width: int = 128
    latent: bool = False
    values: int = 128
    fp8: bool = False

    def __post_init__(self) -> None:
        pages = -(-self.length // PAGE)
        table = np.random.default_rng(0).permutation(self.rows * pages).reshape(self.rows, pages)
        tokens = self.rows * self.length
        self.q = torch.randn(tokens, self.heads, self.width, device=DEVICE, dtype=BF16)
        self.k = torch.randn(self.rows * pages * PAGE, self.groups, self.width, device=DEVICE, dtype=BF16)
        self.v = torch.randn_like(self.k)
        self.params = PagedAttentionParams(PAGE, self.width**-0.5)
        if self.fp8:
            self.k, self.v, scales = quantized(self.k, self.v, self.values if self.latent else None)
            self.params = self.params._replace(kv_scales=scales)
        self.pages = torch.from_numpy(table.astype(np.int32)).to(DEVICE)
        ones = np.ones(self.rows, np.int64)
        tiles = build_prefill_tiles(0 * ones, self.length * ones, np.arange(self.rows), 0)
        self.tiles = torch.from_numpy(tiles).to(DEVICE)

    def run(self) -> Tensor:
        params = self.params
        if self.latent:
            return mla_prefill_attention(self.q, self.k, self.pages, self.tiles, params, value_dim=self.values)
        return prefill_attention(self.q, self.k, self.v, self.pages, self.tiles, params)

    def fp8_column(self, spent: float) -> str:
        """The same over an FP8 cache."""
        took = milliseconds(replace(self, fp8=True).run)
        return f"  FP8 {took * 1e3:9.1f} us ({spent / took:.2f}x)"

    def line(self, copy: float) -> str:
        spent = milliseconds(self.run)
        seen = self.rows * self.length * (self.length + 1) / 2
        values = self.values if self.latent else self.width
        rate = 2 * self.heads * (self.width + values) * seen / spent * 1e3
        line = f"{self.name:44s} {spent * 1e3:9.1f} us  {rate / 1e12:5.0f} TFLOP/s"
        if self.latent:
            return line + self.fp8_column(spent)
        slots = (self.pages.long()[:, :, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten(1)[:, : self.length]
        k, v = (x[slots].transpose(1, 2).contiguous() for x in (self.k, self.v))
        q = self.q.view(self.rows, self.length, self.heads, self.width).transpose(1, 2).contiguous()

        def torchs() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        theirs = milliseconds(torchs)
        error = apart(self.run(), torchs().transpose(1, 2).flatten(0, 1))
        line += f"  torch {theirs * 1e3:9.1f} us ({theirs / spent:.2f}x its speed)  apart {error:.1e}"
        return line + self.fp8_column(spent)


def cases() -> list[Callable[[], Decode | Prefill]]:
    lengths = np.random.default_rng(0).integers(200, 1900, 256)
    samples = np.full(256, 1536)
    family: dict[str, Any] = {"family": 8, "common": 1024}
    mla: dict[str, Any] = {"groups": 1, "width": 576, "values": 512, "latent": True}
    return [
        lambda: Decode("256 rows of 200-1900, 8 x 2 heads of 128", lengths),
        *(partial(Decode, f"256 rows of {n}, 8 x 2 heads of 128", np.full(256, n)) for n in (1, 64, 128, 256)),
        lambda: Decode("8 rows of 8000, 8 x 2 heads of 128", np.full(8, 8000)),
        lambda: Decode("256 rows of 200-1900, 8 x 4 heads of 128", lengths, share=4),
        lambda: Decode("256 rows of 200-1900, 8 x 1 heads of 64", lengths, share=1, width=64),
        lambda: Decode("32 x 8 rows, 1024 shared + 512, tiles of 16", samples, **family, prefix_queries=16),
        lambda: Decode("32 x 8 rows, 1024 shared + 512, tiles of 64", samples, **family),
        lambda: Decode("the same, each reading its own", samples, **family, shared=False),
        lambda: Decode("1 row of 1024", np.array([1024])),
        lambda: Decode("1 row of 32768", np.array([32768])),
        lambda: Decode("64 rows of 2048, latent, 16 heads", np.full(64, 2048), share=16, **mla),
        lambda: Decode("64 rows of 2048, latent, 128 heads", np.full(64, 2048), share=128, **mla),
        lambda: Prefill("8 x 1024 new tokens, 32 heads, 8 kv", 8, 1024),
        lambda: Prefill("1 x 8192 new tokens, 32 heads, 8 kv", 1, 8192),
        lambda: Prefill("1 x 4096 new tokens, latent, 16 heads", 1, 4096, 16, 1, 576, True, 512),
    ]


# -- tuning ---------------------------------------------------------------------------------

DECODE_TRIED = [
    TileTuning(tokens, warps, stages)
    for tokens, warps in ((32, 4), (64, 2), (64, 4), (128, 4), (128, 8))
    for stages in (3, 5, 7)
]
LATENT_TRIED = [TileTuning(tokens, warps, stages) for tokens in (16, 32, 64) for warps in (4, 8) for stages in (3, 5)]
PREFILL_TRIED = [
    PrefillTile(queries, TileTuning(tokens, warps, stages))
    for queries, tokens, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))
    for stages in (2, 3, 5)
    if TILE % queries == 0
]


def measure_or_inf(run: Callable[[], object]) -> float:
    """How long it takes; for ever, if it does not fit on the card."""
    from triton.runtime.errors import OutOfResources

    try:
        return milliseconds(run)
    except OutOfResources:
        return math.inf


def tune_decode(case: Any, table: dict, key: object, tried: list[TileTuning]) -> None:
    before, found = table[key], []
    for tuning in tried:
        for resident in (1, 2, 3, 4):
            table[key] = tuning._replace(resident=resident)
            found.append((measure_or_inf(case.run), table[key]))
            if found[-1][0] == math.inf:
                break
    table[key] = before
    show(case.name, key, before, measure_or_inf(case.run), found)


def tune_prefill(case: Any, key: int) -> None:
    before, found = tile_config.PREFILL_TILES[key], []
    for tile in PREFILL_TRIED:
        tile_config.PREFILL_TILES[key] = tile
        found.append((measure_or_inf(case.run), tile))
    tile_config.PREFILL_TILES[key] = before
    show(case.name, key, before, measure_or_inf(case.run), found)


def show(name: str, key: object, before: object, spent: float, found: list) -> None:
    print(f"{name}, {key}: now {spent * 1e3:.1f} us with {before}", flush=True)
    for best, tuning in sorted(found, key=lambda pair: pair[0])[:4]:
        print(f"    {best * 1e3:9.1f} us {tuning}", flush=True)


def tune() -> None:
    made = cases()
    plain, four, narrow, sixteen, sixty_four, alone = made[0], made[1], made[2], made[3], made[4], made[7]
    for make, key in ((plain, (128, 16)), (four, (128, 16)), (narrow, (64, 16)), (alone, (128, 16))):
        tune_decode(make(), tile_config.DECODE_TUNINGS, key, DECODE_TRIED)
    tune_decode(sixteen(), tile_config.DECODE_TUNINGS, (128, 16), DECODE_TRIED)
    tune_decode(sixty_four(), tile_config.DECODE_TUNINGS, (128, 64), DECODE_TRIED)
    tune_decode(made[8](), tile_config.MLA_DECODE_TUNINGS, 16, LATENT_TRIED)
    tune_decode(made[9](), tile_config.MLA_DECODE_TUNINGS, 64, LATENT_TRIED)
    for make in made[10:12]:
        tune_prefill(make(), 128)


# -- tuning for an FP8 KV cache ---------------------------------------------------------------


def _decode_tiles(*tiles: tuple[int, int]) -> list[Any]:
    return [TileTuning(tokens, warps, stages) for tokens, warps in tiles for stages in (3, 5, 7)]


def _prefill_tiles(*tiles: tuple[int, int, int]) -> list[Any]:
    return [
        PrefillTile(queries, TileTuning(tokens, warps, stages))
        for queries, tokens, warps in tiles
        for stages in (2, 3, 4)
    ]


@dataclass(frozen=True)
class Entry:
    """An entry of a table in ``tile_config``, the cases (by index) it is measured with, and the tiles to try."""

    name: str
    table: str
    key: Any
    cases: tuple[int, ...]
    tried: list[Any]


FP8_TUNED = [
    Entry("decode128", "FP8_DECODE_TUNINGS", (128, 16), (0, 1, 3), _decode_tiles((64, 2), (64, 4), (128, 4), (128, 8))),
    Entry("decode64", "FP8_DECODE_TUNINGS", (64, 16), (2,), _decode_tiles((64, 4), (128, 4), (256, 4))),
    Entry("prefix128", "FP8_DECODE_TUNINGS", (128, 64), (4,), _decode_tiles((64, 4), (128, 4), (128, 8))),
    Entry("mla16", "FP8_MLA_DECODE_TUNINGS", 16, (8,), _decode_tiles((32, 4), (64, 4), (64, 8), (128, 8))),
    Entry("mla32", "FP8_MLA_DECODE_TUNINGS", 32, (9,), _decode_tiles((32, 8), (64, 4), (64, 8))),
    Entry("prefill128", "FP8_PREFILL_TILES", 128, (10, 11), _prefill_tiles((64, 64, 4), (128, 64, 8), (128, 128, 8))),
    Entry("mlaprefill", "FP8_MLA_PREFILL_TILE", None, (12,), _prefill_tiles((32, 64, 4), (32, 64, 8), (64, 64, 8))),
]


def use_tile(entry: Entry, tile: Any) -> Any:
    """Make ``tile`` the entry's, and return the one that was."""
    table = getattr(tile_config, entry.table)
    if entry.key is None:
        setattr(tile_config, entry.table, tile)
        return table
    before, table[entry.key] = table[entry.key], tile
    return before


@cache
def fp8_case(index: int) -> Decode | Prefill:
    return replace(cases()[index](), fp8=True)


def compile_tile(entry: int, tile: Any) -> None:
    """Run the cases of an entry once with this tile, so that Triton's cache on disk has their kernels."""
    from triton.runtime.errors import OutOfResources

    torch.manual_seed(0)
    before = use_tile(FP8_TUNED[entry], tile)
    with torch.inference_mode():
        for index in FP8_TUNED[entry].cases:
            with contextlib.suppress(OutOfResources):
                fp8_case(index).run()
    use_tile(FP8_TUNED[entry], before)


def tune_fp8(only: list[str]) -> None:
    start = time.monotonic()
    entries = [(index, entry) for index, entry in enumerate(FP8_TUNED) if not only or entry.name in only]
    workers = min(12, max(1, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_tile, index, tile) for index, entry in entries for tile in entry.tried]
        for job in jobs:
            job.result()
    print(f"compiled {len(jobs)} tiles in {time.monotonic() - start:.0f} s", flush=True)
    for _, entry in entries:
        tune_entry(entry)
    print(f"{time.monotonic() - start:.0f} s in all", flush=True)


def tune_entry(entry: Entry) -> None:
    """Print the best tiles of an entry: the times of its cases beside those in bfloat16, and their mean ratio."""
    wide = [milliseconds(cases()[index]().run) for index in entry.cases]
    made = [fp8_case(index) for index in entry.cases]

    def measure(tile: Any) -> tuple[float, list[float], Any]:
        before = use_tile(entry, tile)
        spent = [measure_or_inf(case.run) for case in made]
        use_tile(entry, before)
        return math.prod(t / w for t, w in zip(spent, wide, strict=True)) ** (1 / len(wide)), spent, tile

    def residents(tile: Any) -> list[Any]:
        return [tile._replace(resident=count) for count in (1, 2, 3, 4)] if isinstance(tile, TileTuning) else [tile]

    table = getattr(tile_config, entry.table)
    now = measure(table if entry.key is None else table[entry.key])
    found = sorted((measure(each) for tile in entry.tried for each in residents(tile)), key=lambda one: one[0])
    print(f"{entry.name}, {entry.table}[{entry.key}]: bf16 {', '.join(f'{1e3 * w:.1f}' for w in wide)} us", flush=True)
    for mark, (ratio, spent, tile) in [("now ", now), *(("best", one) for one in found[:3])]:
        times = ", ".join(f"{1e3 * t:.1f}" for t in spent)
        print(f"    {mark} {times} us ({1 / ratio:.2f}x)    {entry.key}: {_literal(tile)},", flush=True)


def _literal(tile: Any) -> str:
    if isinstance(tile, PrefillTile):
        return f"PrefillTile({tile.queries}, {_literal(tile.tuning)})"
    return f"TileTuning({', '.join(str(value) for value in tile)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try tiles, warps and stages; takes minutes to compile")
    parser.add_argument("--tune-fp8", action="store_true", help="try tiles over an FP8 KV cache, print the best")
    names = [entry.name for entry in FP8_TUNED]
    parser.add_argument("--only", nargs="*", choices=names, default=[], help="entries that --tune-fp8 tries; else all")
    args = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name(DEVICE)}: copy {copy / 1e12:.2f} TB/s", flush=True)
    with torch.inference_mode():
        if args.tune:
            tune()
            return
        if args.tune_fp8:
            tune_fp8(args.only)
            return
        for make in cases():
            print(make().line(copy), flush=True)


if __name__ == "__main__":
    main()
