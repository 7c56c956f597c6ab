"""Load, create and save draft models: MTP layers inside a policy's checkpoint, an EAGLE-3 head as a folder.

Shapes: v reduced vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.core.errors import CheckpointError, UsageError
from miles.kernels.numerics import FAST, Numerics
from miles.models.checkpoint import hf
from miles.models.checkpoint import load as loading
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import read_config, stored_tensors
from miles.models.checkpoint.save_plan import SavePlan, SaveUnit, plan_unit, single_tensor_unit
from miles.models.checkpoint.tensor_sources import locate_params, read_quant_config
from miles.models.draft.base import Draft
from miles.models.draft.eagle import EagleDraft
from miles.models.draft.mtp import MtpDraft
from miles.models.draft.param_map import (
    TOKEN_OFFSETS,
    build_draft_map,
    build_eagle_config,
    count_mtp_layers,
    read_eagle_spec,
    stacked_draft_names,
)
from miles.models.draft.spec import DraftSpec, build_mtp_spec, find_mtp_layout
from miles.models.spec import DecoderSpec

__all__ = [
    "build_meta_draft",
    "init_eagle",
    "load_draft_params",
    "load_eagle",
    "load_mtp",
    "plan_draft_save",
    "read_mtp_spec",
]

_OFFSETS = "token_offsets_v"


def read_mtp_spec(folder: Path | str, policy: DecoderSpec, count: int | None = None) -> DraftSpec:
    """Read which MTP layers the policy's checkpoint has; a UsageError if it has none that can be used, or not
    ``count``.
    """
    layout = find_mtp_layout(policy)
    if layout is None:
        raise UsageError(f"MTP layers of a {policy.family} model are not supported; use an EAGLE-3 head instead.")
    found = count_mtp_layers(policy, layout, stored_tensors(folder))
    if not found:
        raise UsageError(
            f"{folder} has no MTP layers, whose names begin with {layout.block.format(policy.num_layers)}.; use a "
            "checkpoint that has them, or an EAGLE-3 head instead."
        )
    if count is not None and found != count:
        raise UsageError(f"--mtp-num-layers is {count}, but {folder} has {found}; set it to {found}, or remove it.")
    return build_mtp_spec(policy, layout, found)


def build_meta_draft(spec: DraftSpec, *, dtype: torch.dtype, numerics: Numerics = FAST) -> MtpDraft | EagleDraft:
    """Build a draft of ``spec`` without storage."""
    kind = MtpDraft if spec.kind == "mtp" else EagleDraft
    return kind(spec, device="meta", dtype=dtype, numerics=numerics)


def load_mtp(
    folder: Path | str,
    policy: DecoderSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    numerics: Numerics = FAST,
    count: int | None = None,
) -> MtpDraft:
    """Load the MTP layers in the checkpoint of ``policy``, ``count`` of them if it is given; quantized weights are
    dequantized.
    """
    draft = MtpDraft(read_mtp_spec(folder, policy, count), device="meta", dtype=dtype, numerics=numerics)
    draft.load_state_dict(load_draft_params(folder, draft, device=device), assign=True)
    return draft


def load_eagle(
    folder: Path | str,
    policy: DecoderSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    numerics: Numerics = FAST,
) -> EagleDraft:
    """Load an EAGLE-3 head for ``policy`` from its folder."""
    spec = read_eagle_spec(read_config(folder), policy, folder)
    draft = EagleDraft(spec, device="meta", dtype=dtype, numerics=numerics)
    draft.load_state_dict(load_draft_params(folder, draft, device=device), assign=True)
    return draft


def init_eagle(
    spec: DraftSpec, *, seed: int, device: torch.device | str, dtype: torch.dtype, numerics: Numerics = FAST
) -> EagleDraft:
    """Create an EAGLE-3 head of the policy's vocabulary with random weights, as ``hf.init_random`` does."""
    assert spec.draft_vocab_size is None, "the tokens of a reduced vocabulary come from a checkpoint"
    draft = EagleDraft(spec, device="meta", dtype=dtype, numerics=numerics)
    draft.load_state_dict(hf.sample_params(draft, seed=seed, device=device), assign=True)
    return draft


def load_draft_params(folder: Path | str, draft: Draft, *, device: torch.device | str) -> dict[str, Tensor]:
    """Read every parameter and buffer of ``draft``, in its dtypes, from a folder with its tensors among others."""
    spec, stored = draft.spec, stored_tensors(folder)
    quant = read_quant_config(read_config(folder))
    sources = locate_params(build_draft_map(spec), stacked_draft_names(spec), stored, quant, Path(folder))
    params: Mapping[str, Tensor] = dict(draft.named_parameters())
    assert params.keys() == sources.keys(), params.keys() ^ sources.keys()
    tensors = loading.load_params(sources, params, rank=0, world=1, device=device, reader=FileReader())
    found = dict(tensors)
    if draft.token_offsets_v is not None:
        found[_OFFSETS] = _read_offsets(Path(folder), len(draft.token_offsets_v)).to(device)
    return found


def _read_offsets(folder: Path, size: int) -> Tensor:
    stored = stored_tensors(folder).get(TOKEN_OFFSETS)
    if stored is None or stored.dtype != "I64" or stored.shape != (size,):
        raise CheckpointError(f"{TOKEN_OFFSETS} of {folder} must be {size} integers (I64) for its draft_vocab_size.")
    content = bytearray(stored.stop - stored.start)
    with FileReader() as reader:
        reader.read(TOKEN_OFFSETS, stored.file, stored.start, memoryview(content))
    return torch.frombuffer(content, dtype=torch.int64)


def plan_draft_save(draft: MtpDraft | EagleDraft, dtype: torch.dtype) -> SavePlan:
    """Plan the folder of a draft in ``dtype``: its tensors under their Hugging Face names, and a config.

    Parameters that are always float32 stay so. The config of MTP layers only says what they are: a policy's checkpoint
    contains the tensors too.
    """
    params = dict(type(draft)(draft.spec, device="meta", dtype=dtype).named_parameters())
    units: list[SaveUnit] = [
        plan_unit(name, pieces, params[name].dtype, None, "fp8") for name, pieces in build_draft_map(draft.spec).items()
    ]
    if draft.token_offsets_v is not None:
        units.append(single_tensor_unit(TOKEN_OFFSETS, draft.token_offsets_v))
    return SavePlan(units=tuple(units), config=_build_config(draft.spec, dtype), extra_files={})


def _build_config(spec: DraftSpec, dtype: torch.dtype) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    if spec.kind == "eagle3":
        return build_eagle_config(spec, name)
    return {"model_type": "mtp", "policy_family": spec.decoder.family, "num_layers": spec.num_layers, "dtype": name}
