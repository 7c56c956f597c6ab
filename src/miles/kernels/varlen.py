"""Causal attention within each sequence of a packed batch.

Shapes: T tokens, H query heads, G key-value heads, d channels of a key, e of a value, B sequences of a block, S its
longest, P all slots of all blocks, padding included, t tokens chosen for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.long import has_long, long_attention
from miles.kernels.masked import choose, masked_attention
from miles.kernels.sinks import sunk_attention
from miles.kernels.terms import Index, Terms

HALF = (torch.bfloat16, torch.float16)
# The widest head of the fused CUDA kernel, and the channels it counts in.
FUSED_WIDTH, FUSED_STEP = 256, 8
# Blocks up to this long take a window as a mask; in longer ones it pays to leave out what lies behind it.
_MASKED_LENGTH = 256


@cache
def varlen_kernel() -> tuple[Callable[..., Any], dict[str, bool]]:
    """Torch's varlen attention. Newer releases share key-value heads only when told to, older ones always do."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


# -- sequences into blocks ------------------------------------------------------------------


def blocks_of(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences of like length together, so that each padded block is less than twice its tokens."""
    blocks: list[list[int]] = []
    longest = used = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        if blocks and (len(blocks[-1]) + 1) * longest < 2 * (used + lengths[index]):
            blocks[-1].append(index)
            used += lengths[index]
        else:
            blocks.append([index])
            longest = used = lengths[index]
    for block in blocks:
        block.sort()
    return blocks


@dataclass(frozen=True, slots=True)
class _Layout:
    """The sequences of each block, its (sequences, longest), which token fills each slot, where each token sits.

    Blocks without padding, in the order of the tokens, need no moving of rows: both indices are None.
    """

    blocks: list[list[int]]
    shapes: list[tuple[int, int]]
    token_P: Tensor | None
    slot_T: Tensor | None


class _Pad(torch.autograd.Function):
    """Tokens into slots. A padding slot repeats some token: to the right of a sequence nobody looks at it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, token_P: Tensor, slot_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.slot_T = slot_T
        return q.index_select(0, token_P), k.index_select(0, token_P), v.index_select(0, token_P)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        slot_T = ctx.slot_T
        return dq.index_select(0, slot_T), dk.index_select(0, slot_T), dv.index_select(0, slot_T), None, None


class _Unpad(torch.autograd.Function):
    """Slots back into tokens. A padding slot's gradient is zero, so it teaches no key or value."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, slot_T: Tensor) -> Tensor:
        ctx.slot_T, ctx.slots = slot_T, len(out)
        return out.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        padded = grad.new_zeros(ctx.slots, *grad.shape[1:])
        padded[ctx.slot_T] = grad
        return padded, None


class _Pack:
    """Sequences one after the other, and what their layers share."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths, self.device = lengths, device
        self.longest = max(lengths, default=0)
        self._ends: dict[tuple[int, ...], Tensor] = {}
        if device.type == "cuda":
            self.ends = self.ends_of(lengths)
        self._layouts: dict[int, _Layout] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}

    def ends_of(self, lengths: Sequence[int]) -> Tensor:
        """Where sequences of these lengths end, on the device."""
        key = tuple(lengths)
        if key not in self._ends:
            made = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            self._ends[key] = made.to(self.device, non_blocking=True)
        return self._ends[key]

    def layout(self, alone: int) -> _Layout:
        """Blocks in which a sequence of more than ``alone`` tokens has no mates."""
        alone = min(alone, self.longest)
        if alone not in self._layouts:
            blocks = blocks_of([n if n <= alone else 0 for n in self.lengths] if alone < self.longest else self.lengths)
            blocks += [[i] for i, n in enumerate(self.lengths) if n > alone]
            self._layouts[alone] = self._lay_out(blocks)
        return self._layouts[alone]

    def _lay_out(self, blocks: list[list[int]]) -> _Layout:
        lengths = np.asarray(self.lengths)
        starts = np.cumsum(lengths) - lengths
        shapes: list[tuple[int, int]] = []
        tokens: list[NDArray[np.int64]] = []
        slot_T = np.empty(lengths.sum(), dtype=np.int64)
        used = 0
        for block in blocks:
            place_S = np.arange(lengths[block].max())
            real_BS = place_S < lengths[block, None]
            token_BS = starts[block, None] + place_S * real_BS
            slot_T[token_BS[real_BS]] = used + np.flatnonzero(real_BS)
            shapes.append(token_BS.shape)
            tokens.append(token_BS.ravel())
            used += token_BS.size
        if used == len(slot_T) and (len(blocks) == 1 or np.array_equal(slot_T, np.arange(used))):
            return _Layout(blocks, shapes, None, None)
        token_P = torch.from_numpy(np.concatenate(tokens)).to(self.device)
        return _Layout(blocks, shapes, token_P, torch.from_numpy(slot_T).to(self.device))

    def mask(self, longest: int, window: int) -> Tensor:
        """What a token sees through a window, [S, S]."""
        if (longest, window) not in self._masks:
            every_SS = torch.ones(longest, longest, device=self.device, dtype=torch.bool)
            self._masks[longest, window] = every_SS.tril().triu_(1 - window)
        return self._masks[longest, window]


# -- attention ------------------------------------------------------------------------------


@dataclass(slots=True)
class PackedCarry:
    """A ``Carry`` of sequences that all begin here."""

    lengths: Sequence[int]
    state: tuple[Tensor, ...] | None = None

    def keep(self, state: tuple[Tensor, ...]) -> None:
        """Nobody asks."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """The ``top`` tokens each token sees, [n, top], of each sequence that is longer."""

    top: int
    chosen: dict[int, Tensor]


class PackedAttend:
    """An ``Attend`` over a packed batch of ``lengths``; made once per forward, used by every layer.

    On CUDA in half precision torch's varlen kernel does it; otherwise sequences of like length share
    a padded block and each block is one call. What neither can do is written out in ``masked``.
    """

    latent = False

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        self._lengths = [int(n) for n in lengths]
        self._total = sum(self._lengths)
        self._whole = _Pack(self._lengths, torch.device(device))
        self._cut: dict[int, _Pack] = {}
        self._choices: dict[int, _Choice | None] = {}

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGe: Tensor,
        terms: Terms,
        *,
        sinks_H: Tensor | None = None,
        index: Index | int | None = None,
    ) -> Tensor:
        assert len(q_THd) == self._total, f"{len(q_THd)} tokens for sequences of {self._total} in all"
        if not self._total:
            return q_THd[..., :1].expand(-1, -1, v_TGe.shape[-1])
        pack = self._whole
        if terms.chunk is not None:
            pack, terms = self._pack(terms.chunk), replace(terms, chunk=None)
        choice = None
        if index is not None:
            assert pack is self._whole and terms.window is None, "tokens are chosen among all that came before"
            choice = self._choose(layer, index)
        fused = q_THd.is_cuda and q_THd.dtype in HALF and max(q_THd.shape[-1], v_TGe.shape[-1]) <= FUSED_WIDTH
        if fused and choice is None and terms.softcap is None:
            return _varlen(pack, q_THd, k_TGd, v_TGe, terms, sinks_H)
        return _padded(pack, q_THd, k_TGd, v_TGe, terms, sinks_H, choice)

    def carry(self, layer: int) -> PackedCarry:
        """What a recurrent layer left behind: every sequence begins here."""
        return PackedCarry(self._lengths)

    def _pack(self, chunk: int) -> _Pack:
        """Chunks of a sequence are sequences of their own: none sees another."""
        if chunk >= self._whole.longest:
            return self._whole
        if chunk not in self._cut:
            cut = [min(chunk, n - start) for n in self._lengths for start in range(0, n, chunk)]
            self._cut[chunk] = _Pack(cut, self._whole.device)
        return self._cut[chunk]

    def _choose(self, layer: int, index: Index | int) -> _Choice | None:
        """Who is seen, or None where that is everyone."""
        if isinstance(index, int):
            assert index in self._choices, f"layer {layer} sees what layer {index} chose, which has not chosen yet"
            return self._choices[index]
        # A layer that runs again in backward must choose as it did, however its kernels round this time.
        again = layer in self._choices and torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        if not again:
            self._choices[layer] = self._chosen(index) if index.top < self._whole.longest else None
        return self._choices[layer]

    def _chosen(self, index: Index) -> _Choice:
        chosen: dict[int, Tensor] = {}
        tensors = (index.q_THd, index.k_Td, index.weights_TH)
        for i, (q_Shd, k_Sd, weights_Sh) in enumerate(zip(*(x.split(self._lengths) for x in tensors), strict=True)):
            if len(k_Sd) > index.top:
                chosen[i] = choose(q_Shd, k_Sd, weights_Sh, index.top)
        return _Choice(index.top, chosen)


def widen(x: Tensor, width: int) -> Tensor:
    """More channels, of zeros."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _varlen(pack: _Pack, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, terms: Terms, sinks_H: Tensor | None) -> Tensor:
    wanted = v_TGe.shape[-1]
    width = -(-max(q_THd.shape[-1], wanted) // FUSED_STEP) * FUSED_STEP
    q, k, v = (widen(x, width) for x in (q_THd, k_TGd, v_TGe))
    ends, longest = pack.ends, pack.longest
    window = None if terms.window is None or terms.window >= longest else terms.window
    kernel, options = varlen_kernel()
    if sinks_H is not None:
        out = sunk_attention(q, k, v, sinks_H, ends, longest, scale=terms.scale, window=window)
    elif window is None and has_long(pack.lengths, width):

        def packed(at: slice, lengths: Sequence[int]) -> Tensor:
            some, most = pack.ends_of(lengths), max(lengths)
            back = (-1, 0)
            return kernel(q[at], k[at], v[at], some, some, most, most, scale=terms.scale, window_size=back, **options)

        out = long_attention(q, k, v, pack.lengths, terms.scale, packed)
    else:
        back = (-1 if window is None else window - 1, 0)
        out = kernel(q, k, v, ends, ends, longest, longest, scale=terms.scale, window_size=back, **options)
    return out if width == wanted else out[..., :wanted]


def _padded(
    pack: _Pack,
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGe: Tensor,
    terms: Terms,
    sinks_H: Tensor | None,
    choice: _Choice | None,
) -> Tensor:
    layout = pack.layout(pack.longest if choice is None else choice.top)
    q, k, v = q_THd, k_TGd, v_TGe
    if layout.token_P is not None:
        q, k, v = _Pad.apply(q, k, v, layout.token_P, layout.slot_T)  # pyright: ignore[reportGeneralTypeIssues]
    if len(layout.shapes) == 1:
        out = _block(pack, q, k, v, layout.shapes[0], terms, sinks_H, _of(choice, layout.blocks[0]))
    else:
        sizes = [b * s for b, s in layout.shapes]
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), layout.shapes, layout.blocks, strict=True)
        out = torch.cat(
            [_block(pack, qb, kb, vb, shape, terms, sinks_H, _of(choice, block)) for qb, kb, vb, shape, block in parts]
        )
    return out if layout.slot_T is None else _Unpad.apply(out, layout.slot_T)  # pyright: ignore[reportReturnType]


def _of(choice: _Choice | None, block: list[int]) -> Tensor | None:
    """What was chosen in a block, [B, S, t]: a sequence that had to choose is alone in its own."""
    chosen_St = None if choice is None else choice.chosen.get(block[0])
    return None if chosen_St is None else chosen_St[None]


def _block(
    pack: _Pack,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: tuple[int, int],
    terms: Terms,
    sinks_H: Tensor | None,
    chosen_BSt: Tensor | None,
) -> Tensor:
    q_BSHd, k_BSGd, v_BSGe = q.unflatten(0, shape), k.unflatten(0, shape), v.unflatten(0, shape)
    longest = shape[1]
    window = None if terms.window is None or terms.window >= longest else terms.window
    plain = sinks_H is None and chosen_BSt is None and terms.softcap is None
    if not plain or (window is not None and longest > _MASKED_LENGTH):
        out_BSHe = masked_attention(q_BSHd, k_BSGd, v_BSGe, terms, sinks_H=sinks_H, chosen_BSt=chosen_BSt)
        return out_BSHe.flatten(0, 1)
    mask_SS = None if window is None else pack.mask(longest, window)
    q_BHSd, k_BGSd, v_BGSe = q_BSHd.transpose(1, 2), k_BSGd.transpose(1, 2), v_BSGe.transpose(1, 2)
    return plain_attention(q_BHSd, k_BGSd, v_BGSe, terms.scale, mask_SS).transpose(1, 2).flatten(0, 1)


def plain_attention(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSe: Tensor, scale: float, mask_SS: Tensor | None) -> Tensor:
    """Attention of a block, causal or as ``mask_SS`` says."""
    wanted, dtype, gqa = v_BGSe.shape[-1], q_BHSd.dtype, q_BHSd.shape[1] != k_BGSd.shape[1]
    unlike = q_BHSd.shape[-1] != wanted or dtype in HALF
    if unlike and not q_BHSd.is_cuda:
        # The CPU's kernel that keeps no scores wants one width, and in half precision it may be a hundred times slower.
        width, wide = max(q_BHSd.shape[-1], wanted), torch.promote_types(dtype, torch.float32)
        q_BHSd, k_BGSd, v_BGSe = (widen(x.to(wide), width) for x in (q_BHSd, k_BGSd, v_BGSe))
    out_BHSe = F.scaled_dot_product_attention(
        q_BHSd, k_BGSd, v_BGSe, attn_mask=mask_SS, is_causal=mask_SS is None, scale=scale, enable_gqa=gqa
    )
    return out_BHSe[..., :wanted].to(dtype) if unlike else out_BHSe
