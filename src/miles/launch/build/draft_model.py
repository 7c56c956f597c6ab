"""The draft model of --speculative-algorithm draft-model, loaded beside an engine's policy."""

from __future__ import annotations

from pathlib import Path

import torch

from miles.backends.native.config import NativeConfig
from miles.core.errors import UsageError
from miles.kernels.numerics import Numerics
from miles.models.base import CausalLM
from miles.models.checkpoint import hf
from miles.models.resolve import resolve_spec
from miles.models.tokenizer import fingerprint_vocabulary


def load_draft_model(
    config: NativeConfig, policy: Path, *, device: torch.device, dtype: torch.dtype, numerics: Numerics
) -> CausalLM | None:
    """Load the draft model, if one is named; raise a ``UsageError`` if it has another vocabulary than ``policy``."""
    if config.speculative_draft_model_path is None:
        return None
    folder = Path(config.speculative_draft_model_path)
    known, found = fingerprint_vocabulary(policy), fingerprint_vocabulary(folder)
    if known is not None and found is not None and known != found:
        raise UsageError(
            f"--speculative-draft-model-path {folder} has another vocabulary than {policy}, so it cannot draft for it; "
            "name a model with the same tokenizer."
        )
    spec = resolve_spec(folder, "native")
    return hf.load_model(folder, spec, device=device, dtype=dtype, numerics=numerics)
