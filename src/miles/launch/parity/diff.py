"""Difference of two backends, operation by operation: where they first differ, by how much, and how it grows.

Shapes: T tokens, n values of an operation a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.models.activation_hooks import EXPERTS_OPERATION, OPERATIONS, ActivationKey, common_keys

_MAX_LAYERS = 12
"""Models with more layers show only residuals, and all operations of the layer that differs first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationDiff:
    """The difference of two backends after one operation.

    ``relative`` is the norm of the difference over that of the values; of experts, the share of tokens whose experts
    differ. ``equal`` means bit for bit. ``growth`` is how much ``relative`` grew over the layer.
    """

    place: ActivationKey
    most: float
    mean: float
    relative: float
    equal: bool
    growth: float | None = None

    def within(self, tolerance: float) -> bool:
        """Whether it is within ``tolerance``: absolute for log-probs, relative for others."""
        found = self.most if self.place[1] == "log-probs" else self.relative
        return found <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityDiff:
    """Every operation that both backends record, in order, for a model with ``layers`` layers.

    ``not_compared`` are the operations that only one records, or both in different shapes.
    """

    gaps: tuple[ActivationDiff, ...]
    layers: int
    not_compared: tuple[ActivationKey, ...] = ()

    def first(self, tolerance: float | None) -> ActivationDiff | None:
        """The first difference beyond ``tolerance``; None counts any different bit."""
        different = (g for g in self.gaps if (not g.equal if tolerance is None else not g.within(tolerance)))
        return next(different, None)


def compare(a: Mapping[ActivationKey, Tensor], b: Mapping[ActivationKey, Tensor], *, layers: int) -> ParityDiff:
    """Compare the activations of two backends on the same tokens."""
    gaps: list[ActivationDiff] = []
    before: float | None = None
    for place in common_keys(a, b):
        gap = _compare_operation(place, a[place], b[place])
        if place[1] in ("embedding", "residual"):
            growth = gap.relative / before if before else None
            before, gap = gap.relative, replace(gap, growth=growth)
        gaps.append(gap)
    seen = {gap.place for gap in gaps}
    not_compared = sorted({*a, *b} - seen, key=lambda place: (place[0], OPERATIONS.index(place[1])))
    return ParityDiff(gaps=tuple(gaps), layers=layers, not_compared=tuple(not_compared))


def _compare_operation(place: ActivationKey, a_Tn: Tensor, b_Tn: Tensor) -> ActivationDiff:
    equal = a_Tn.dtype == b_Tn.dtype and torch.equal(a_Tn, b_Tn)
    if place[1] == EXPERTS_OPERATION:
        share = float((a_Tn != b_Tn).any(-1).double().mean())
        return ActivationDiff(place=place, most=float(share > 0), mean=share, relative=share, equal=share == 0)
    a_Tn, b_Tn = a_Tn.double(), b_Tn.double()
    diff_Tn, size = (a_Tn - b_Tn).abs(), float(a_Tn.norm())
    relative = float(diff_Tn.norm()) / size if size else float(diff_Tn.norm())
    relative = math.inf if math.isnan(relative) else relative
    return ActivationDiff(
        place=place, most=float(diff_Tn.max()), mean=float(diff_Tn.mean()), relative=relative, equal=equal
    )


# -- output ---------------------------------------------------------------------------------


def format_key(place: ActivationKey, layers: int) -> str:
    """
    >>> format_key((3, "qkv"), 8), format_key((8, "logits"), 8), format_key((-1, "embedding"), 8)
    ('layer 3: qkv', 'logits', 'embedding')
    """
    layer, operation = place
    return f"layer {layer}: {operation}" if 0 <= layer < layers else operation


def as_text(found: ParityDiff, *, a: str, b: str, tolerance: float | None) -> str:
    """The table and its conclusion."""
    first = found.first(tolerance)
    rows = [("operation", "max |Δ|", "mean |Δ|", "relative", "growth", "")]
    for gap in _select_rows(found, first):
        growth = "" if gap.growth is None else f"x{gap.growth:.2f}"
        mark = "=" if gap.equal else "<- first" if gap is first else ""
        figures = (f"{gap.most:.3g}", f"{gap.mean:.3g}", f"{gap.relative:.3g}")
        rows.append((format_key(gap.place, found.layers), *figures, growth, mark))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [
        f"{row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    text = [*(line.rstrip() for line in lines), "", describe_difference(found, a=a, b=b, tolerance=tolerance)]
    return "\n".join([*text, *describe_not_compared(found)])


def describe_difference(found: ParityDiff, *, a: str, b: str, tolerance: float | None) -> str:
    """Where two backends first differ, or that they do not."""
    first, last = found.first(tolerance), found.gaps[-1]
    if first is None:
        equality = "equal bit for bit" if tolerance is None else f"within {tolerance:g}"
        count = len(found.gaps)
        return f"{a} and {b} are {equality} in all {count} operations; log-probs differ by {last.most:.3g} at most."
    where = format_key(first.place, found.layers)
    if first.place[1] == EXPERTS_OPERATION:
        by = f"{first.mean:.2%} of the tokens have other experts"
    else:
        by = f"{first.most:.3g} at most, {first.mean:.3g} on average, {first.relative:.3g} relative"
    return f"{a} and {b} first differ at {where}: {by}; log-probs then differ by {last.most:.3g} at most."


def describe_not_compared(found: ParityDiff) -> list[str]:
    """A sentence about the operations that were not compared, if there are any."""
    missing = {name: sum(place[1] == name for place in found.not_compared) for _, name in found.not_compared}
    if not missing:
        return []
    seen = {gap.place[1] for gap in found.gaps}
    parts = [
        f"{name} (in {missing[name]} of {found.layers} layers)" if name in seen else name
        for name in OPERATIONS
        if name in missing
    ]
    return [f"Not compared, since only one backend records it: {', '.join(parts)}."]


def _select_rows(found: ParityDiff, first: ActivationDiff | None) -> Sequence[ActivationDiff]:
    if found.layers <= _MAX_LAYERS:
        return found.gaps
    layers = {first.place[0]} if first is not None else set[int]()
    ends = ("embedding", "residual", "final norm", "logits", "log-probs")
    return [gap for gap in found.gaps if gap.place[1] in ends or gap.place[0] in layers]
