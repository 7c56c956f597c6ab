"""Types of ``miles parity`` backends: a model and its tokens in, the activations of every operation out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from miles.core.types import Tokens
from miles.kernels.numerics import Numerics
from miles.models.activation_hooks import ActivationKey
from miles.models.spec import DecoderSpec

MAX_VALUES = 1 << 26
"""Logits with more values than this are not kept."""
TIMEOUT = 600.0
"""Seconds a backend may take to start, or a server to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityModel:
    """A checkpoint and how it is run.

    ``numerics`` are for the native engine and the fsdp trainer, ``prefill_chunk`` is for the native engine;
    ``sglang_python`` is the interpreter with SGLang, by default this one, and ``sglang_flags`` are flags of its server.
    """

    folder: Path
    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    numerics: Numerics
    prefill_chunk: int
    trust_remote_code: bool = False
    sglang_python: str | None = None
    sglang_flags: tuple[str, ...] = ()


Activations = Mapping[ActivationKey, Tensor]
ParityBackend = Callable[[ParityModel, Sequence[Tokens]], Activations]
