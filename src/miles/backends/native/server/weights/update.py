"""Weight updates of a running engine, by Hugging Face names: all tensors or some, from disk, a body or a group.

The engine always gets a whole publication: tensors that were not sent stay as they are, those that were are checked,
and it switches to all of them at once or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from miles.backends.native.engine.engine import NativeEngine
from miles.core.errors import SyncError, UsageError
from miles.core.types import Version
from miles.models.checkpoint import hf, param_map
from miles.models.checkpoint.param_slices import HfSlice, param_shape
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.draft.checkpoint import load_draft_params
from miles.models.draft.spec import DRAFT_PREFIX
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.packed_map import build_packed_map
from miles.models.spec import DecoderSpec
from miles.sync.manifest import Manifest, ManifestEntry, compute_digests
from miles.sync.publish import Publication

T = TypeVar("T")
_MAX_JSON_BYTES = 256 << 20
TensorIndex = Mapping[str, tuple[str, HfSlice]]
"""Hugging Face name -> our name, and the slice of our tensor."""
DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and not name.startswith("_")
} | {"int8": torch.int8, "uint8": torch.uint8}
"""Dtypes of weights by the names a client may use: ``bfloat16``, ``half``, and the integers of packed weights."""


class ToThreadExecutor:
    """Implements cluster.executor.Executor: work runs on a thread of its own, not on the event loop's."""

    is_threaded = True

    async def __call__(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    def close(self) -> None: ...


@lru_cache(maxsize=8)
def build_spec_index(spec: DecoderSpec) -> TensorIndex:
    """The index of a model of ours."""
    slices = build_packed_map(spec)
    index = {piece.hf_name: (name, piece) for name, pieces in slices.items() for piece in pieces}
    for name, hf_name in param_map.stacked_expert_names(spec).items():
        shape = param_shape(slices[name])
        index[hf_name] = (name, HfSlice(hf_name, shape, 0, shape[0]))
    return index


def build_index(spec: DecoderSpec, current: Mapping[str, Tensor]) -> TensorIndex:
    """The index of a model's tensors; a transformers module has Hugging Face names already, a draft head our own."""
    if isinstance(spec, HfAdapterSpec):
        return {name: _index_whole(name, tensor) for name, tensor in current.items()}
    head = {name: _index_whole(name, tensor) for name, tensor in current.items() if name.startswith(DRAFT_PREFIX)}
    return {**build_spec_index(spec), **head} if head else build_spec_index(spec)


def _index_whole(name: str, tensor: Tensor) -> tuple[str, HfSlice]:
    return name, HfSlice(name, tuple(tensor.shape), 0, len(tensor))


def list_tensors(spec: DecoderSpec, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights by Hugging Face name, each once; those of a draft head by their own."""
    if isinstance(spec, HfAdapterSpec):
        return {name: tensor.detach() for name, tensor in current.items()}
    names = [piece.hf_name for pieces in build_packed_map(spec).values() for piece in pieces]
    return get_tensors(spec, current, [*names, *(name for name in current if name.startswith(DRAFT_PREFIX))])


def merge_tensors(spec: DecoderSpec, current: Mapping[str, Tensor], updates: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``current`` with the ``updates`` copied in; a tensor without an update is the very tensor it was."""
    index = build_index(spec, current)
    fresh: dict[str, Tensor] = {}
    for hf_name, tensor in updates.items():
        if hf_name not in index:
            if not isinstance(spec, HfAdapterSpec) and param_map.is_ignorable(spec, hf_name):
                continue
            raise SyncError(f"{hf_name} is not a tensor of this model.")
        name, piece = index[hf_name]
        if tuple(tensor.shape) != piece.shape:
            raise SyncError(f"{hf_name} has shape {tuple(tensor.shape)}, but this model's has {piece.shape}.")
        if problem := _find_dtype_problem(tensor.dtype, current[name].dtype):
            raise SyncError(f"{hf_name} is {tensor.dtype}, but {problem}.")
        if name not in fresh:
            fresh[name] = current[name].detach().clone()
        piece.view(fresh[name]).copy_(tensor)
    return {**{name: tensor.detach() for name, tensor in current.items()}, **fresh}


def _find_dtype_problem(dtype: torch.dtype, own: torch.dtype) -> str | None:
    """Why a tensor of ``dtype`` cannot be copied into one of ``own`` (the end of a sentence); packed values are copied
    as they are, others are rounded.
    """
    if own.itemsize == 1 and dtype != own:
        return f"this model's is quantized ({own}); send packed tensors, or update from a checkpoint on disk"
    return None if dtype == own or dtype.is_floating_point else "weights are floating-point numbers"


def get_tensor(spec: DecoderSpec, current: Mapping[str, Tensor], hf_name: str) -> Tensor | None:
    """The tensor of this Hugging Face name; None where there is none."""
    return get_tensors(spec, current, [hf_name]).get(hf_name)


def get_tensors(spec: DecoderSpec, current: Mapping[str, Tensor], hf_names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of these Hugging Face names; unknown names are left out."""
    index = build_index(spec, current)
    found = ((hf_name, index[hf_name]) for hf_name in hf_names if hf_name in index)
    return {hf_name: piece.view(current[name].detach()) for hf_name, (name, piece) in found}


def load_safetensors(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise SyncError(f"The body is not a safetensors file: {error}.") from error


def find_small_tensor(engine: NativeEngine) -> Tensor:
    """A small tensor of the engine, for its device and dtype; waits for the engine's ranks."""
    weights = engine.weights()
    return weights[list(weights)[1]]


class WeightUpdater:
    """Publishes weights to one engine; the caller ensures one publication at a time.

    ``num_ranks`` share the engine's model, so the whole of it need not fit on one device.
    """

    def __init__(self, engine: NativeEngine, num_ranks: int) -> None:
        self._engine = engine
        self._num_ranks = num_ranks

    async def update_from_disk(self, folder: str) -> Version:
        """The weights of a checkpoint of the same architecture."""
        return await self._publish(lambda: self._load_checkpoint(Path(folder)))

    async def update_from_tensors(self, updates: Mapping[str, Tensor]) -> Version:
        """Some or all tensors by their Hugging Face names."""
        engine = self._engine
        return await self._publish(lambda: merge_tensors(engine.spec, engine.weights(), updates))

    async def update_from_placed(self, placed: Mapping[str, Tensor], digests: Mapping[str, int]) -> Version:
        """Tensors by the engine's own names, in their final form; those with known ``digests`` are not read again."""
        version = self._next_version()
        await asyncio.to_thread(self._commit_placed, version, placed, digests)
        return version

    def _next_version(self) -> Version:
        current = self._engine.version
        return Version() if current is None else current.next()

    def _commit_placed(self, version: Version, placed: Mapping[str, Tensor], known: Mapping[str, int]) -> None:
        engine = self._engine
        tensors = {name: tensor.detach() for name, tensor in {**engine.weights(), **placed}.items()}
        unread = {name: tensor for name, tensor in tensors.items() if name not in known}
        digests = {**compute_digests(unread), **known}
        entries = tuple(
            ManifestEntry(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype), digest=digests[name])
            for name, tensor in tensors.items()
        )
        try:
            engine.begin(Manifest(version=version, entries=entries))
            for name, tensor in tensors.items():
                engine.receive(name, tensor, digests[name])
            engine.verify()
        except SyncError:
            engine.rollback()
            raise
        engine.commit()

    async def _publish(self, weights: Callable[[], Mapping[str, Tensor]]) -> Version:
        version = self._next_version()
        await Publication(weights=weights, engines=[self._engine], transport="made", run=ToThreadExecutor()).publish(
            version
        )
        return version

    def _load_head(self, folder: Path, device: torch.device | str) -> dict[str, Tensor]:
        """The draft head for a checkpoint: its MTP layers; an EAGLE-3 head, which it does not have, stays."""
        head = self._engine.draft_head
        if head is None:
            return {}
        if head.spec.kind == "mtp":
            tensors: Mapping[str, Tensor] = load_draft_params(folder, head, device=device)
        else:
            tensors = {name: parameter.detach() for name, parameter in head.named_parameters()}
        return {DRAFT_PREFIX + name: tensor for name, tensor in tensors.items()}

    def _load_checkpoint(self, folder: Path) -> Mapping[str, Tensor]:
        engine = self._engine
        if isinstance(engine.spec, HfAdapterSpec):
            raise SyncError("A model run by transformers takes no weights from disk; send tensors instead.")
        try:
            if not (folder / "config.json").is_file():
                raise SyncError(f"{folder} is not a checkpoint: it has no config.json.")
            for file in (*folder.glob("*.json"), *folder.glob("*.safetensors")):
                if not file.is_file():
                    raise SyncError(f"{file} is not a regular file.")
                if file.suffix == ".json" and file.stat().st_size > _MAX_JSON_BYTES:
                    raise SyncError(f"{file} has more than {_MAX_JSON_BYTES} bytes.")
            like = find_small_tensor(engine)
            device = like.device if self._num_ranks == 1 else "cpu"
            read_config(folder)
            params = dict(hf.load_decoder_params(folder, engine.spec, device=device, dtype=like.dtype))
            return params | self._load_head(folder, device)
        except UsageError as error:
            raise SyncError(str(error)) from error
        except OSError as error:
            raise SyncError(f"{folder} cannot be read: {error.strerror or error}.") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SyncError(f"{folder} is not a checkpoint of this model: {type(error).__name__}: {error}.") from error
