"""Conversion of checkpoints between Hugging Face and Megatron's distributed format (torch_dist), in one process.

Needs neither Megatron nor a GPU, and one tensor in memory at a time: names and layouts are those of ``param_mapping``,
and the format describes whole tensors, so any parallel layout wrote it and any reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.backends.megatron.param_mapping import (
    ParamMapping,
    build_head_mappings,
    build_param_mappings,
    parse_layer_index,
)
from miles.backends.megatron.supported_models import check_megatron_support
from miles.backends.megatron.torch_dist_keys import VOCABULARY, list_extra_states, list_keys, list_possible_keys
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint.convert import RECEIPT, Progress, SafetensorsOutput, draft_folder, ignore_progress
from miles.models.checkpoint.load import ParamReader
from miles.models.checkpoint.quant_config import read_quant_config
from miles.models.checkpoint.safetensors_io import TensorHeader, config_dtype, read_config, stored_tensors, write_json
from miles.models.checkpoint.save import SHARD_BYTES, read_stored_bytes
from miles.models.checkpoint.save_plan import SavePlan, SaveUnit, plan_save, single_tensor_unit
from miles.models.checkpoint.sequence_classifier import SCORE, SequenceClassifier, build_decoder_config
from miles.models.checkpoint.tensor_sources import ParamSource, locate_tensors
from miles.models.checkpoint.torch_dist import TorchDistReader, TorchDistWriter
from miles.models.checkpoint.torch_dist_folders import RELEASE, write_tracker
from miles.models.families import spec_from_config
from miles.models.spec import DecoderSpec
from miles.train.draft_trainer import DRAFT_FOLDERS

_CHUNK_BYTES = 256 << 20
_MODEL_KEYS = ("decoder.", "embedding.", "output_layer.", "vision.", SCORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDistPlan:
    """A conversion to or from torch_dist: what it reads, writes, and leaves out."""

    source: Path
    spec: DecoderSpec
    save_plan: SavePlan
    mappings: Mapping[str, ParamMapping]
    left_out: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors of the model."""
        return sum(prod(unit.shape) * unit.dtype.itemsize for unit in self.save_plan.units)


def _check_family(spec: DecoderSpec, folder: Path) -> None:
    problem = check_megatron_support(spec, ParallelDims(world=1))
    if problem is not None:
        what = problem.removeprefix("the megatron backend cannot train ").partition("; use --train-backend")[0]
        raise UsageError(f"{folder} has no torch_dist form, since Megatron has no such model: {what.rstrip('.')}.")


# -- Hugging Face -> torch_dist ---------------------------------------------------------------


def plan_to_torch_dist(source: Path, *, dtype: torch.dtype) -> TorchDistPlan:
    """Check a Hugging Face folder and plan its torch_dist form in ``dtype``; what is always float32 stays so."""
    config = read_config(source)
    spec = spec_from_config(config)
    _check_family(spec, source)
    plan = plan_save(spec, dtype=dtype, like=source, config=config)
    locate_tensors(spec, stored_tensors(source), read_quant_config(config), source)  # reports what is missing
    return TorchDistPlan(
        source=source,
        spec=spec,
        save_plan=plan,
        mappings=build_param_mappings(spec, transformer_engine=False),
        left_out=tuple(name for name, _ in plan.extra_tensors),
    )


def convert_to_torch_dist(plan: TorchDistPlan, target: Path, *, progress: Progress | None = None) -> None:
    """Write ``target``: a checkpoint named release and the file that names it; nothing is left if that fails."""
    with draft_folder(target) as draft:
        folder = draft / RELEASE
        folder.mkdir()
        writer = TorchDistWriter(folder)
        try:
            digests = _write_params(plan, writer, progress or ignore_progress)
            for state in list_extra_states(plan.spec):
                writer.write_object(f"{state.key}/shard_{state.index}_{state.count}", [None])
            writer.finish(plan.spec, iteration=0)
        finally:
            writer.close()
        plan.save_plan.write_metadata(folder)
        write_json(draft / RECEIPT, _build_receipt(plan, digests))
        write_tracker(draft, RELEASE)


def _write_params(plan: TorchDistPlan, writer: TorchDistWriter, progress: Progress) -> dict[str, str]:
    config = read_config(plan.source)
    sources = locate_tensors(plan.spec, stored_tensors(plan.source), read_quant_config(config), plan.source)
    digests: dict[str, Any] = {}
    with ParamReader("cpu") as params:
        for unit in plan.save_plan.units:
            progress(unit.name, writer.done_bytes, plan.total_bytes)
            keys, layer = list_keys(plan.spec, unit.name)
            for first, chunk in _read_chunks(unit, sources[unit.name], plan.mappings[unit.name], params):
                for key in keys:
                    digests.setdefault(key, hashlib.sha256()).update(_bytes(chunk))
                    if layer is None:
                        offsets = (first, *(0 for _ in unit.shape[1:]))
                        writer.write(key, chunk, unit.shape, offsets)
                    else:
                        shape = (plan.spec.num_layers, *unit.shape)
                        writer.write(key, chunk[None], shape, (layer, first, *(0 for _ in unit.shape[1:])))
    return {key: digest.hexdigest() for key, digest in digests.items()}


def _read_chunks(
    unit: SaveUnit, sources: Sequence[ParamSource], mapping: ParamMapping, params: ParamReader
) -> Iterator[tuple[int, Tensor]]:
    """Yield a parameter in Megatron's order: one expert, or rows of the vocabulary, at a time."""
    rows = unit.shape[0]
    each = rows
    if mapping.expert:
        each = 1
    elif unit.name in VOCABULARY:
        each = max(1, _CHUNK_BYTES // (4 * prod(unit.shape[1:])))
    for first in range(0, rows, each):
        count = min(each, rows - first)
        own = [s for s in sources if s.piece.expert in (None, first)] if mapping.expert else sources
        full = params.read(own, (count, *unit.shape[1:]), unit.dtype, first=first)
        yield first, full if each < rows else mapping.to_megatron(full)


# -- torch_dist -> Hugging Face ---------------------------------------------------------------


def plan_from_torch_dist(source: Path, *, origin: Path, dtype: torch.dtype) -> TorchDistPlan:
    """Check a torch_dist folder against the config of ``origin``, a Hugging Face folder; plan its form in ``dtype``.

    A CheckpointError names a tensor that is missing, of another shape, or of no use in a model of that config.
    """
    shapes, config = TorchDistReader(source).shapes(), read_config(origin)
    if SCORE in shapes:  # a reward model
        config = build_decoder_config(config)
    spec = spec_from_config(config)
    _check_family(spec, origin)
    mappings = build_param_mappings(spec, transformer_engine=False)
    for name in mappings:  # another family is better named by what it lacks than by sizes
        _find_key(shapes, spec, name, source)
    for name, mapping in mappings.items():
        _locate_key(shapes, spec, name, mapping, source)
    used = {SCORE} | {key for name in mappings for key in list_possible_keys(spec, name)}
    unused = sorted(key for key in shapes if key not in used and key.startswith(_MODEL_KEYS))
    if unused:
        raise CheckpointError(
            f"{source} has {unused[0]}, which a {spec.family} model of {spec.num_layers} layers does not have; give "
            "the folder of its own model with --origin-hf-dir."
        )
    save_plan = plan_save(spec, dtype=dtype, like=origin, config=config)
    if SCORE in shapes:
        mappings = {**mappings, **build_head_mappings({SCORE: shapes[SCORE]})}
        save_plan = _add_score(save_plan, spec, shapes[SCORE])
    if (source / DRAFT_FOLDERS["mtp"]).is_dir():  # MTP layers that a run trained
        trained = stored_tensors(source / DRAFT_FOLDERS["mtp"])
        save_plan = replace(save_plan, extra_tensors=tuple({**dict(save_plan.extra_tensors), **trained}.items()))
    return TorchDistPlan(
        source=source,
        spec=spec,
        save_plan=save_plan,
        mappings=mappings,
        left_out=tuple(sorted(key for key in shapes if not key.startswith(_MODEL_KEYS))),
    )


def _add_score(plan: SavePlan, spec: DecoderSpec, shape: tuple[int, ...]) -> SavePlan:
    """Return the plan of transformers' sequence classifier, whose score head is always float32."""
    unit = single_tensor_unit(SCORE, torch.empty(shape, device="meta"))
    config = SequenceClassifier(plan.config, spec.eos_token_ids).build_config(plan.config)
    extra = tuple(each for each in plan.extra_tensors if each[0] != SCORE)
    return replace(plan, units=(*plan.units, unit), config=config, extra_tensors=extra)


def _find_key(shapes: Mapping[str, tuple[int, ...]], spec: DecoderSpec, name: str, source: Path) -> str:
    keys = list_possible_keys(spec, name)
    key = next((key for key in keys if key in shapes), None)
    if key is None:
        raise CheckpointError(
            f"{source} has no {keys[0]}, which a {spec.family} model needs; give the folder of its own "
            "model with --origin-hf-dir."
        )
    return key


def _locate_key(
    shapes: Mapping[str, tuple[int, ...]], spec: DecoderSpec, name: str, mapping: ParamMapping, source: Path
) -> tuple[str, int | None]:
    """Return the key of a parameter, and its layer if layers are stacked in it."""
    key = _find_key(shapes, spec, name, source)
    layer = parse_layer_index(name)
    stacked = layer is not None and not key.startswith(f"decoder.layers.{layer}.")
    found, wanted = shapes[key], (spec.num_layers, *mapping.shape) if stacked else mapping.shape
    if name in VOCABULARY and found[1:] == wanted[1:] and found[0] >= wanted[0]:
        return key, None  # padded rows
    if found != wanted:
        raise CheckpointError(
            f"{key} in {source} has shape {found}, not {wanted} as a {spec.family} model of this config; give the "
            "folder of its own model with --origin-hf-dir."
        )
    return key, layer if stacked else None


def convert_from_torch_dist(plan: TorchDistPlan, target: Path, *, progress: Progress | None = None) -> None:
    """Write a Hugging Face folder; nothing is left of it if that fails."""
    report, save_plan = progress or ignore_progress, plan.save_plan
    extra = [TensorHeader(name, s.dtype, s.shape, s.stop - s.start) for name, s in save_plan.extra_tensors]
    headers = [header for unit in save_plan.units for header in unit.headers()] + extra
    reader = TorchDistReader(plan.source)
    shapes = reader.shapes()
    with (
        draft_folder(target) as draft,
        ThreadPoolExecutor(1, thread_name_prefix="hash") as pool,
        ParamReader("cpu") as params,
        SafetensorsOutput(draft, headers, SHARD_BYTES, pool) as output,
    ):
        for unit in save_plan.units:
            report(unit.name, output.done_bytes, plan.total_bytes)
            key, layer = _locate_key(shapes, plan.spec, unit.name, plan.mappings[unit.name], plan.source)
            full = reader.read(key, layer)[: unit.shape[0]]
            for header, view in zip(
                unit.headers(), unit.views(plan.mappings[unit.name].from_megatron(full)), strict=True
            ):
                output.append(header, _bytes(view))
        for header, (name, stored) in zip(extra, save_plan.extra_tensors, strict=True):
            for data in read_stored_bytes(name, stored, params.files):
                output.append(header, memoryview(bytes(data)))  # the buffer is used again
        write_json(draft / RECEIPT, _build_receipt(plan, output.finish()))
        save_plan.write_metadata(draft)


# -- shared -----------------------------------------------------------------------------------


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _build_receipt(plan: TorchDistPlan, written: Mapping[str, str]) -> dict[str, Any]:
    return {"source": str(plan.source), "left_out": list(plan.left_out), "written": dict(written)}


def export_hf(checkpoint: Path, target: Path) -> None:
    """Write the model of a run's torch_dist checkpoint as a Hugging Face folder, in the dtype its config names."""
    named = config_dtype(read_config(checkpoint)) or "bfloat16"
    plan = plan_from_torch_dist(checkpoint, origin=checkpoint, dtype=getattr(torch, named))
    convert_from_torch_dist(plan, target)
