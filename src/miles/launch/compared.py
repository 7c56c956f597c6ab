"""Two programs' readings of the same tokens, operation by operation: where they part, by how much, how it grows.

Shapes: T tokens, n values of an operation a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.models.taps import CHOICES, OPERATIONS, Place, common

_SHOWN = 12
"""Layers whose every operation is shown; of more, only what they leave behind, and those where programs part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far two programs are apart after one operation.

    ``relative`` is the norm of the difference over that of the values; of experts, the share of tokens whose differ.
    ``equal``: to the last bit. ``growth`` is how much ``relative`` grew over the layer.
    """

    place: Place
    most: float
    mean: float
    relative: float
    equal: bool
    growth: float | None = None

    def within(self, tolerance: float) -> bool:
        """Is it nothing to speak of? A log-prob's difference counts as it is, others by their size."""
        found = self.most if self.place[1] == "log-probs" else self.relative
        return found <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Every operation both programs tell of, in order; ``layers`` is how many the model has.

    ``unseen`` are the places that only one tells of, or both in different shapes.
    """

    gaps: tuple[Gap, ...]
    layers: int
    unseen: tuple[Place, ...] = ()

    def first(self, tolerance: float | None) -> Gap | None:
        """Where they part first: beyond ``tolerance``, or None for by any bit."""
        apart = (g for g in self.gaps if (not g.equal if tolerance is None else not g.within(tolerance)))
        return next(apart, None)


def compare(a: Mapping[Place, Tensor], b: Mapping[Place, Tensor], *, layers: int) -> Compared:
    """Hold two readings of the same tokens side by side."""
    gaps: list[Gap] = []
    before: float | None = None
    for place in common(a, b):
        gap = _gap(place, a[place], b[place])
        if place[1] in ("embedding", "residual"):
            growth = gap.relative / before if before else None
            before, gap = gap.relative, Gap(**{**_fields(gap), "growth": growth})
        gaps.append(gap)
    seen = {gap.place for gap in gaps}
    unseen = sorted({*a, *b} - seen, key=lambda place: (place[0], OPERATIONS.index(place[1])))
    return Compared(gaps=tuple(gaps), layers=layers, unseen=tuple(unseen))


def _fields(gap: Gap) -> dict[str, object]:
    return {name: getattr(gap, name) for name in ("place", "most", "mean", "relative", "equal", "growth")}


def _gap(place: Place, a_Tn: Tensor, b_Tn: Tensor) -> Gap:
    equal = a_Tn.dtype == b_Tn.dtype and torch.equal(a_Tn, b_Tn)
    if place[1] == CHOICES:
        share = float((a_Tn != b_Tn).any(-1).double().mean())
        return Gap(place=place, most=float(share > 0), mean=share, relative=share, equal=share == 0)
    a_Tn, b_Tn = a_Tn.double(), b_Tn.double()
    apart_Tn, size = (a_Tn - b_Tn).abs(), float(a_Tn.norm())
    relative = float(apart_Tn.norm()) / size if size else float(apart_Tn.norm())
    relative = math.inf if math.isnan(relative) else relative
    return Gap(place=place, most=float(apart_Tn.max()), mean=float(apart_Tn.mean()), relative=relative, equal=equal)


# -- shown ----------------------------------------------------------------------------------


def name_of(place: Place, layers: int) -> str:
    """
    >>> name_of((3, "qkv"), 8), name_of((8, "logits"), 8), name_of((-1, "embedding"), 8)
    ('layer 3: qkv', 'logits', 'embedding')
    """
    layer, operation = place
    return f"layer {layer}: {operation}" if 0 <= layer < layers else operation


def as_text(found: Compared, *, a: str, b: str, tolerance: float | None) -> str:
    """The table, and what it comes to in one sentence."""
    first = found.first(tolerance)
    rows = [("operation", "max |Δ|", "mean |Δ|", "relative", "growth", "")]
    for gap in _chosen(found, first):
        growth = "" if gap.growth is None else f"x{gap.growth:.2f}"
        mark = "=" if gap.equal else "<- first" if gap is first else ""
        figures = (f"{gap.most:.3g}", f"{gap.mean:.3g}", f"{gap.relative:.3g}")
        rows.append((name_of(gap.place, found.layers), *figures, growth, mark))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [
        f"{row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    told = [*(line.rstrip() for line in lines), "", sentence(found, a=a, b=b, tolerance=tolerance)]
    return "\n".join([*told, *hidden(found)])


def sentence(found: Compared, *, a: str, b: str, tolerance: float | None) -> str:
    """Where two programs part, or that they do not."""
    first, last = found.first(tolerance), found.gaps[-1]
    if first is None:
        how = "equal to the last bit" if tolerance is None else f"within {tolerance:g}"
        return (
            f"{a} and {b} are {how} in all {len(found.gaps)} operations; log-probs differ by {last.most:.3g} at most."
        )
    where = name_of(first.place, found.layers)
    if first.place[1] == CHOICES:
        by = f"{first.mean:.2%} of the tokens go to other experts"
    else:
        by = f"{first.most:.3g} at most, {first.mean:.3g} on average, {first.relative:.3g} of its size"
    return f"{a} and {b} part at {where}: {by}; log-probs then differ by {last.most:.3g} at most."


def hidden(found: Compared) -> list[str]:
    """What could not be held side by side, in one sentence, if there is any."""
    missing = {name: sum(place[1] == name for place in found.unseen) for _, name in found.unseen}
    if not missing:
        return []
    seen = {gap.place[1] for gap in found.gaps}
    parts = [
        f"{name} (in {missing[name]} of {found.layers} layers)" if name in seen else name
        for name in OPERATIONS
        if name in missing
    ]
    return [f"Not compared, since not both show it: {', '.join(parts)}."]


def _chosen(found: Compared, first: Gap | None) -> Sequence[Gap]:
    if found.layers <= _SHOWN:
        return found.gaps
    whole = {first.place[0]} if first is not None else set[int]()
    ends = ("embedding", "residual", "final norm", "logits", "log-probs")
    return [gap for gap in found.gaps if gap.place[1] in ends or gap.place[0] in whole]
