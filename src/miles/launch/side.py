"""What a side of ``miles parity`` is: a model, read by a backend that tells what every operation gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from miles.core.types import Tokens
from miles.models.spec import DecoderSpec
from miles.models.taps import Place

MOST = 1 << 26
"""More numbers than this are not kept of an operation that others tell as well."""
SECONDS = 600.0
"""What a backend may take to start, or a server to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint, and how it is computed here.

    ``prefill_chunk`` is how many tokens an engine's step takes; ``sglang_python`` the interpreter that has SGLang, this
    one where none is named, and ``sglang_flags`` what its server is told besides.
    """

    folder: Path
    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    prefill_chunk: int
    trusted: bool = False
    sglang_python: str | None = None
    sglang_flags: tuple[str, ...] = ()


Traced = Mapping[Place, Tensor]
Side = Callable[[Model, Sequence[Tokens]], Traced]
