"""What the engine's kernels are tried on: each gives pairs of what it computed and what plain torch did.

Kernels run on numbers of a fixed seed as the engine would run them; the same functions in float64 are left to torch.
Shapes: T tokens, D features, E experts, k of them a token, B rows, H query heads, G key-value heads, d channels of a
head, V vocabulary, S slots of a cache, P pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.kernels.alone import attend_one, scratch
from miles.kernels.begin import begin
from miles.kernels.cache import Ints
from miles.kernels.decode import decode_attention, decode_reference
from miles.kernels.device_code import processors
from miles.kernels.draw import draw
from miles.kernels.experts import moe_forward
from miles.kernels.gated import gated
from miles.kernels.latent import (
    head_tiles,
    latent_decode_attention,
    latent_decode_reference,
    latent_prefill_attention,
    latent_prefill_reference,
)
from miles.kernels.norm import add_rms_norm, rms_norm
from miles.kernels.prefill import prefill_attention, prefill_reference, prefill_tiles
from miles.kernels.prepare import Heads, prepare
from miles.kernels.route import route
from miles.kernels.slim import gated_linear, linear, wide_linear
from miles.kernels.tiling import Look
from miles.kernels.work import DecodeWork

Pairs = Iterable[tuple[Tensor, Tensor]]

_EPS, _PAGE = 1e-6, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Of the layers that kernels are tried on, and of what these are given to read."""

    features: int = 1280
    inner: int = 768
    products: tuple[tuple[int, int], ...] = ((1280, 300), (9728, 96))
    experts: int = 8
    # So many tokens for two experts each that every way to cut them up is taken.
    tokens: tuple[int, ...] = (2, 12, 32, 64, 128)
    routed: int = 128
    heads: int = 8
    kv_heads: int = 2
    widths: tuple[int, ...] = (64, 128, 256)
    # Heads, channels of a key, and how many of these are its value.
    latent: tuple[int, int, int] = (16, 576, 512)
    lengths: tuple[int, ...] = (900, 700, 1, 130, 37)
    shared: int = 512
    window: int = 200
    vocabulary: int = 20_000


# Few sample in float32: one shape of each.
FEWER = Shapes(products=((1280, 300),), tokens=(12,), widths=(128,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where a kernel is tried, and in which numbers."""

    device: torch.device
    dtype: torch.dtype
    shapes: Shapes
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def sms(self) -> int:
        """Processors that work is cut for."""
        return processors(self.device)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers, made on the CPU so that they are the same everywhere."""
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def ask(self, kernel: Callable[..., Any], *given: Any, **how: Any) -> Any:
        """What a kernel gives. All that it is given is there first: kernels may read weights and tables early."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return kernel(*given, **how)

    def shuffled(self, count: int) -> Tensor:
        """The numbers below ``count``, in some order."""
        return torch.randperm(count, generator=self.generator).to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel by name, what it gives and what was wanted of it, and how often it rounds beyond the usual."""

    name: str
    run: Callable[[Ground], Pairs]
    slack: float = 1.0


def cases(shapes: Shapes) -> Iterator[Case]:
    """What is tried, what every model needs first."""
    middle = shapes.widths[len(shapes.widths) // 2]
    yield Case(name="norm", run=_norm)
    yield Case(name="a step's beginning", run=_begin)
    yield Case(name="activation", run=_gated, slack=2)
    yield Case(name="heads of a projection", run=partial(_prepare, width=middle))
    for width in shapes.widths:
        yield Case(name=f"decode attention of {width} channels", run=partial(_decode, width=width))
        yield Case(name=f"prefill attention of {width} channels", run=partial(_prefill, width=width))
        yield Case(name=f"lone attention of {width} channels", run=partial(_lone_attention, width=width), slack=2)
    yield Case(name="decode attention of a shared prefix", run=partial(_decode, width=middle, shared=shapes.shared))
    yield Case(name="decode attention in a window", run=partial(_decode, width=middle, narrow=True))
    yield Case(name="prefill attention in a window", run=partial(_prefill, width=middle, narrow=True))
    yield Case(name="latent decode attention", run=_latent_decode)
    yield Case(name="latent prefill attention", run=_latent_prefill)
    yield Case(name="lone product", run=_lone_product)
    yield Case(name="lone gated product", run=_lone_gate)
    yield Case(name="lone logits", run=_lone_logits)
    yield Case(name="router", run=_routes)
    yield Case(name="experts", run=partial(_experts, tokens=shapes.tokens), slack=2)
    yield Case(name="experts of a lone token", run=partial(_experts, tokens=(1,)), slack=2)
    yield Case(name="drawing", run=partial(_drawn, filters=False))
    yield Case(name="drawing with filters", run=partial(_drawn, filters=True))


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The same numbers, for torch."""
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]


# -- rows -----------------------------------------------------------------------------------


def _begin(g: Ground) -> Pairs:
    given_4n = torch.stack([g.shuffled(9)[:7] for _ in range(4)]).int()
    given_4n[0, ::2] = -1
    drawn_S, pages_N, table_RM = g.shuffled(9), g.shuffled(80).int(), g.shuffled(99).int().view(9, 11)
    places_N, known_n = (
        g.shuffled(98)[:80].int(),
        torch.where(given_4n[0] < 0, drawn_S[given_4n[3].long()], given_4n[0]),
    )
    wanted_RM = table_RM.view(-1).index_put((places_N.long(),), pages_N).view(9, 11)
    begun = g.ask(begin, *given_4n, drawn_S=drawn_S, places_N=places_N, pages_N=pages_N, table_RM=table_RM)
    yield from zip((*begun, table_RM), (known_n, *given_4n[1:].long(), wanted_RM), strict=True)


def _norm(g: Ground) -> Pairs:
    x_TD, delta_TD = 3 * g.random(5, g.shapes.features), g.random(5, g.shapes.features)
    weight_D = g.random(g.shapes.features)
    x, delta, weight = _wide(x_TD, delta_TD, weight_D)
    yield g.ask(rms_norm, x_TD, weight_D, _EPS), rms_norm(x, weight, _EPS)
    got = g.ask(add_rms_norm, x_TD, delta_TD, weight_D, _EPS, offset=1.0)
    yield from zip(got, add_rms_norm(x, delta, weight, _EPS, offset=1.0), strict=True)


def _gated(g: Ground) -> Pairs:
    inner_R2I = 4 * g.random(5, 2 * g.shapes.inner)
    for kind in ("silu", "gelu_tanh", "relu2", "swiglu_clamped"):
        yield g.ask(gated, inner_R2I, kind), gated(inner_R2I.double(), kind)
    yield g.ask(gated, inner_R2I, "silu", interleaved=True), gated(inner_R2I.double(), "silu", interleaved=True)


def _lone_product(g: Ground) -> Pairs:
    for inputs, outputs in g.shapes.products:
        given = g.random(1, inputs), g.random(outputs, inputs), g.random(outputs)
        yield g.ask(linear, *given), linear(*_wide(*given))
        yield g.ask(linear, *given[:2]), linear(*_wide(*given[:2]))


def _lone_gate(g: Ground) -> Pairs:
    for inputs, outputs in g.shapes.products:
        x_1K, weight_NK = g.random(1, inputs), inputs**-0.5 * g.random(outputs, inputs)
        wanted = gated_linear(x_1K.double(), weight_NK.double(), None, "silu")
        yield g.ask(gated_linear, x_1K, weight_NK, None, "silu"), wanted


def _lone_logits(g: Ground) -> Pairs:
    for inputs, outputs in g.shapes.products:
        given = g.random(1, inputs), g.random(outputs, inputs)
        yield g.ask(wide_linear, *given), linear(*_wide(*given))


def _experts(g: Ground, tokens: Sequence[int]) -> Pairs:
    count, width, inner = g.shapes.experts, g.shapes.features, g.shapes.inner
    first_EFD, down_EDI = width**-0.5 * g.random(count, 2 * inner, width), inner**-0.5 * g.random(count, width, inner)
    for rows in tokens:
        experts_Tk = torch.stack([g.shuffled(count)[:2] for _ in range(rows)])
        given = g.random(rows, width), g.random(rows, 2).softmax(-1), experts_Tk, first_EFD, down_EDI
        yield g.ask(moe_forward, *given, activation="silu"), moe_forward(*_wide(*given), activation="silu")


def _routes(g: Ground) -> Pairs:
    # No two are alike in any precision, so that there is one answer.
    ladder_TE = torch.stack([g.shuffled(g.shapes.routed) for _ in range(7)]) - g.shapes.routed / 2
    logits_TE = (ladder_TE / 16).to(g.dtype)
    for normalise in (False, True):
        how: dict[str, Any] = {"normalise": normalise, "scale": 1.5}
        wanted = route(logits_TE.double(), 3, **how, dtype=torch.float64)
        yield from zip(g.ask(route, logits_TE, 3, **how, dtype=g.dtype), wanted, strict=True)


def _drawn(g: Ground, filters: bool) -> Pairs:
    heat_B, uniform_B = torch.tensor([[0, 1, 0.7, 1, 1.3, 1], [0.5, 0.1, 0.3, 0.55, 0.75, 0.95]], device=g.device)
    top_k_B = torch.tensor([0, 0, 4, 0, 0, 6], device=g.device)
    top_p_B, min_p_B = torch.tensor([[1, 1, 1, 0.8, 1, 0.9], [0, 0, 0, 0, 0.2, 0.1]], device=g.device)
    # A few tokens have nearly all there is, each far more than sums are rounded by.
    likely_BL = torch.stack([g.shuffled(g.shapes.vocabulary)[:12] for _ in heat_B])
    logits_BV = g.random(len(heat_B), g.shapes.vocabulary).float() - 20
    logits_BV.scatter_(1, likely_BL, torch.linspace(3, 0.25, 12, device=g.device).expand_as(likely_BL))
    limits: dict[str, Any] = {"top_k_B": top_k_B, "top_p_B": top_p_B, "min_p_B": min_p_B, "filters": filters}
    found: list[tuple[Tensor, Tensor]] = []
    for x_BV in (logits_BV, logits_BV.double()):
        tokens_B, logprobs_B = torch.full_like(top_k_B, -1), torch.full_like(heat_B, torch.nan)
        g.ask(draw, x_BV, heat_B, uniform_B, **limits, tokens_out_B=tokens_B, logprobs_out_B=logprobs_B)
        found.append((tokens_B, logprobs_B))
    yield from zip(*found, strict=True)


# -- attention ------------------------------------------------------------------------------


class _Past(NamedTuple):
    """Sequences in scattered pages of a cache; slots that none of them has hold no numbers."""

    lengths_B: Ints
    k_SGd: Tensor
    v_SGd: Tensor
    pages_SP: Tensor
    seats_B: Tensor

    @property
    def cached(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k_SGd, self.v_SGd, self.pages_SP, self.seats_B

    def lengths_on(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.lengths_B).to(device)


def _past(g: Ground, lengths: Sequence[int], groups: int, width: int, shared: int = 0) -> _Past:
    """``shared`` tokens, whole pages of them, are the same ones of the first two sequences."""
    length_B = np.array(lengths)
    counts_B = -(-length_B // _PAGE)
    total, rows = int(counts_B.sum()), len(length_B)
    free = iter(g.shuffled(total).tolist())
    pages_BP = np.full((rows, int(counts_B.max()) + 1), total, np.int32)
    used = np.zeros((total + 1, _PAGE), bool)
    for row, (length, count) in enumerate(zip(length_B.tolist(), counts_B.tolist(), strict=True)):
        pages_BP[row, :count] = [next(free) for _ in range(count)]
        if row == 1:
            pages_BP[row, : shared // _PAGE] = pages_BP[0, : shared // _PAGE]
        used[pages_BP[row, np.arange(length) // _PAGE], np.arange(length) % _PAGE] = True
    k_SGd, v_SGd = (g.random(used.size, groups, width) for _ in range(2))
    for held in (k_SGd, v_SGd):
        held[torch.from_numpy(~used.ravel()).to(g.device)] = torch.nan
    seats_B = np.arange(rows)[::-1].astype(np.int32)
    return _Past(
        length_B, k_SGd, v_SGd, *(torch.from_numpy(x.copy()).to(g.device) for x in (pages_BP[seats_B], seats_B))
    )


def _work(g: Ground, past: _Past, shape: tuple[int, int], queries: int, shared: int = 0) -> DecodeWork:
    """One new token a row, cut up; ``shape`` is key-value heads and query heads of each."""
    rows = len(past.lengths_B)
    group_B, shared_B = np.maximum(np.arange(rows), 1), np.zeros(rows, np.int64)
    shared_B[:2] = shared
    work = DecodeWork(rows, 2 * rows + 512, g.device, trunk_queries=queries)
    work.fill(past.lengths_B, group_B, shared_B, kv_heads=shape[0], queries_per_kv=shape[1], sms=g.sms)
    work.send()
    assert work.has_trunks == bool(shared)
    return work


def _look(g: Ground, width: int, narrow: bool = False) -> dict[str, Any]:
    """All that came before, or a window of it, bounded, with sinks."""
    how: dict[str, Any] = {"page_size": _PAGE, "scale": width**-0.5}
    return how | ({"window": g.shapes.window, "softcap": 3.0, "sinks_H": g.random(g.shapes.heads)} if narrow else {})


def _decode(g: Ground, width: int, *, shared: int = 0, narrow: bool = False) -> Pairs:
    heads, groups = g.shapes.heads, g.shapes.kv_heads
    past = _past(g, g.shapes.lengths, groups, width, shared)
    work, look = _work(g, past, (groups, heads // groups), 64, shared), _look(g, width, narrow)
    q_BHd = g.random(len(past.lengths_B), heads, width)
    q, k, v = _wide(q_BHd, past.k_SGd, past.v_SGd)
    wanted = decode_reference(q, k, v, past.pages_SP, past.seats_B, past.lengths_on(g.device), **look)
    yield g.ask(decode_attention, q_BHd, *past.cached, work, **look), wanted


def _new(g: Ground, past: _Past) -> tuple[int, Tensor]:
    """The later half of each sequence is new: how many tokens, and their tiles."""
    starts_B = past.lengths_B // 2
    counts_B = past.lengths_B - starts_B
    tiles = prefill_tiles(starts_B, counts_B, past.seats_B.cpu().numpy(), 0)
    return int(counts_B.sum()), torch.from_numpy(tiles).to(g.device)


def _prefill(g: Ground, width: int, *, narrow: bool = False) -> Pairs:
    past, look = _past(g, g.shapes.lengths, g.shapes.kv_heads, width), _look(g, width, narrow)
    count, tiles = _new(g, past)
    q_THd = g.random(count, g.shapes.heads, width)
    q, k, v = _wide(q_THd, past.k_SGd, past.v_SGd)
    read = q_THd, past.k_SGd, past.v_SGd, past.pages_SP, tiles
    yield g.ask(prefill_attention, *read, **look), prefill_reference(q, k, v, past.pages_SP, tiles, **look)


def _latent_decode(g: Ground) -> Pairs:
    heads, width, value_dim = g.shapes.latent
    past, look = _past(g, g.shapes.lengths, 1, width), {**_look(g, width), "value_dim": value_dim}
    work = _work(g, past, (head_tiles(heads), heads), 64 if g.dtype.itemsize == 2 else 16)
    q_BHd, pages, seats = g.random(len(past.lengths_B), heads, width), past.pages_SP, past.seats_B
    q, k = _wide(q_BHd, past.k_SGd)
    wanted = latent_decode_reference(q, k, pages, seats, past.lengths_on(g.device), **look)
    yield g.ask(latent_decode_attention, q_BHd, past.k_SGd, pages, seats, work, **look), wanted


def _latent_prefill(g: Ground) -> Pairs:
    heads, width, value_dim = g.shapes.latent
    past, look = _past(g, g.shapes.lengths, 1, width), {**_look(g, width), "value_dim": value_dim}
    count, tiles = _new(g, past)
    q_THd, pages = g.random(count, heads, width), past.pages_SP
    q, k = _wide(q_THd, past.k_SGd)
    wanted = latent_prefill_reference(q, k, pages, tiles, **look)
    yield g.ask(latent_prefill_attention, q_THd, past.k_SGd, pages, tiles, **look), wanted


def _heads(g: Ground, width: int, positions_T: Tensor, *, norm: bool = True, interleaved: bool = False) -> Heads:
    turns_Pr = g.random(int(positions_T.max()) + 1, width // 2).float()
    cos, sin = turns_Pr.cos(), turns_Pr.sin()
    rotation = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(g.dtype).contiguous()
    weights = (g.random(width), g.random(width)) if norm else (None, None)
    return Heads(
        heads=g.shapes.heads,
        kv_heads=g.shapes.kv_heads,
        head_dim=width,
        rotation=rotation,
        positions_T=positions_T,
        interleaved=interleaved,
        q_weight_d=weights[0],
        k_weight_d=weights[1],
        eps=_EPS,
        offset=0.0,
    )


def _prepared(qkv_TN: Tensor, heads: Heads, k_SGd: Tensor, v_SGd: Tensor, slots_T: Tensor) -> Tensor:
    given: dict[str, Any] = {name: getattr(heads, name) for name in Heads.__dataclass_fields__}
    if qkv_TN.dtype == torch.float64:
        given |= {name: x.double() for name, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return prepare(qkv_TN, **given, key_slots=k_SGd, value_slots=v_SGd, slots_T=slots_T)


def _prepare(g: Ground, width: int) -> Pairs:
    slots_T = g.shuffled(9)[:4]
    slots_T[2] = -1
    for plain in (False, True):
        heads = _heads(g, width, g.shuffled(60)[:4], norm=not plain, interleaved=plain)
        qkv_TN = g.random(4, (heads.heads + 2 * heads.kv_heads) * width)
        held = [g.random(9, heads.kv_heads, width) for _ in range(2)]
        k_SGd, v_SGd = _wide(*held)
        wanted_THd = _prepared(qkv_TN.double(), heads, k_SGd, v_SGd, slots_T)
        yield g.ask(_prepared, qkv_TN, heads, *held, slots_T), wanted_THd
        yield from zip(held, (k_SGd, v_SGd), strict=True)


def _lone_attention(g: Ground, width: int) -> Pairs:
    groups, each = g.shapes.kv_heads, g.shapes.heads // g.shapes.kv_heads
    room = scratch(groups, each, width, sms=g.sms, device=g.device)
    for length in (g.shapes.lengths[0], g.shapes.lengths[-1]):
        past, at, look = _past(g, [length], groups, width), length - 1, _look(g, width)
        heads = _heads(g, width, torch.tensor([at], device=g.device))
        qkv_1N = g.random(1, (heads.heads + 2 * groups) * width)
        slot_1 = (past.pages_SP[past.seats_B.long(), at // _PAGE] * _PAGE + at % _PAGE).long()
        k_SGd, v_SGd = _wide(past.k_SGd, past.v_SGd)
        q_1Hd = _prepared(qkv_1N.double(), heads, k_SGd, v_SGd, slot_1)
        read = q_1Hd, k_SGd, v_SGd, past.pages_SP, past.seats_B
        wanted_1Hd = decode_reference(*read, past.lengths_on(g.device), **look)
        whole = Look(_PAGE, look["scale"], None, None, None, None)
        yield g.ask(attend_one, qkv_1N, heads, *past.cached, slot_1, whole, room), wanted_1Hd.flatten(1)
        for got, wanted in ((past.k_SGd, k_SGd), (past.v_SGd, v_SGd)):
            yield got.nan_to_num(9.0), wanted.nan_to_num(9.0)
    yield room.done_G, torch.zeros_like(room.done_G)
