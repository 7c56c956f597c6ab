"""The draft of an engine: the smaller model, MTP layers or EAGLE-3 head of --speculative-algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from miles.backends.native.config import NativeConfig
from miles.core.errors import UsageError
from miles.kernels.numerics import Numerics
from miles.models.base import CausalLM
from miles.models.checkpoint import hf
from miles.models.draft.base import Draft
from miles.models.draft.checkpoint import init_eagle, load_eagle, load_mtp
from miles.models.draft.spec import DRAFT_PREFIX, build_eagle_spec
from miles.models.resolve import resolve_spec
from miles.models.spec import DecoderSpec
from miles.models.tokenizer import fingerprint_vocabulary


def load_engine_draft(
    config: NativeConfig,
    folder: Path,
    policy: DecoderSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    numerics: Numerics,
    head: str | None = None,
) -> CausalLM | Draft | None:
    """Load what --speculative-algorithm drafts with for the policy in ``folder``; None if it needs nothing.

    ``head`` is the folder of an EAGLE-3 head; without one it is new, and its weights come from its trainer.
    """
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path or head
    if algorithm == "draft-model" and path is not None:
        return _load_draft_model(Path(path), folder, device=device, dtype=dtype, numerics=numerics)
    if algorithm == "mtp":
        return load_mtp(folder, policy, device=device, dtype=dtype, numerics=numerics)
    if algorithm == "eagle3" and path is not None:
        return load_eagle(path, policy, device=device, dtype=dtype, numerics=numerics)
    if algorithm == "eagle3":
        return init_eagle(build_eagle_spec(policy), seed=0, device=device, dtype=dtype, numerics=numerics)
    return None


def name_head_weights(head: Draft) -> Mapping[str, Tensor]:
    """The weights of a head under their names in a weight update."""
    return {DRAFT_PREFIX + name: parameter.detach() for name, parameter in head.named_parameters()}


def _load_draft_model(
    folder: Path, policy: Path, *, device: torch.device, dtype: torch.dtype, numerics: Numerics
) -> CausalLM:
    known, found = fingerprint_vocabulary(policy), fingerprint_vocabulary(folder)
    if known is not None and found is not None and known != found:
        raise UsageError(
            f"--speculative-draft-model-path {folder} has another vocabulary than {policy}, so it cannot draft for it; "
            "name a model with the same tokenizer."
        )
    spec = resolve_spec(folder, "native")
    return hf.load_model(folder, spec, device=device, dtype=dtype, numerics=numerics)
