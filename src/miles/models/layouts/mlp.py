"""How an MLP lies in a checkpoint."""

from __future__ import annotations

from miles.models.pieces import Parts, Place
from miles.models.spec import MlpSpec


def parts(spec: MlpSpec, width: int, at: Place) -> Parts:
    """Gate and up are one projection here."""
    rows = {"gate": spec.size, "up": spec.size} if spec.gated else {"up": spec.size}
    first = at.linear("gate_up" if spec.gated else "up", rows, width, bias=spec.bias, fused="gate_up")
    return first | at.linear("down", {"down": width}, spec.size, bias=spec.bias)
