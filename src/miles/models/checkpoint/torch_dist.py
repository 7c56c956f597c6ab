"""Distributed checkpoints (torch_dist): torch's DCP files as Megatron writes them, read and written in one process.

A folder has ``.metadata`` (written last), ``metadata.json``, ``common.pt`` and data files, ``__RANK_N.distcp``. It
describes whole tensors, so the parallel layout that wrote it does not matter. Nothing but tensors and torch's own
metadata classes is unpickled. ``latest_checkpointed_iteration.txt`` in its parent names the newest of several folders.
"""

from __future__ import annotations

import io
import os
import pickle
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from miles.core.errors import CheckpointError
from miles.models.checkpoint.safetensors_io import write_json
from miles.models.checkpoint.torch_dist_folders import (
    BACKEND_FILE,
    COMMON_FILE,
    METADATA_FILE,
    check_torch_dist,
)
from miles.models.spec import AttentionSpec, DecoderSpec, MlaSpec, MlpSpec

_FILE_BYTES = 4 << 30
_PLAIN_GLOBALS = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "set"),
    ("builtins", "slice"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
}
_CLASS_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed._shard.sharded_tensor.metadata",
    "torch.distributed._shard.metadata",
)


# -- reading ----------------------------------------------------------------------------------


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles torch's metadata classes and dtypes only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN_GLOBALS:
            return super().find_class(module, name)
        if module in _CLASS_MODULES:
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs")


class TorchDistReader:
    """Reads whole tensors of a checkpoint by Megatron's names, whatever layout wrote them."""

    def __init__(self, folder: Path) -> None:
        check_torch_dist(folder)
        self.folder = folder
        path = folder / METADATA_FILE
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            entries, self._storage = metadata.state_dict_metadata, metadata.storage_data
            self._tensors = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
            sizes = _needed_sizes(self._storage)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read ({error}); copy the checkpoint again.") from error
        for name, size in sizes.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size < size:
                found = file.stat().st_size if file.is_file() else 0
                raise CheckpointError(f"{file} is incomplete: {found} of {size} bytes; copy the checkpoint again.")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {key: tuple(each.size) for key, each in self._tensors.items()}

    def read(self, key: str, index: int | None = None) -> Tensor:
        """Return a whole tensor, or entry ``index`` of its first dimension."""
        entry = self._tensors[key]
        low, high = (0, entry.size[0]) if index is None else (index, index + 1)
        out = torch.empty((high - low, *entry.size[1:]), dtype=entry.properties.dtype)
        filled = 0
        for chunk in entry.chunks:
            first, last = max(low, chunk.offsets[0]), min(high, chunk.offsets[0] + chunk.sizes[0])
            if first >= last:
                continue
            part = self._read_chunk(key, chunk)[first - chunk.offsets[0] : last - chunk.offsets[0]]
            inner = [slice(o, o + n) for o, n in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)]
            out[(slice(first - low, last - low), *inner)] = part
            filled += part.numel()
        if filled != out.numel():
            raise CheckpointError(f"{self.folder} has {filled} of {out.numel()} values of {key}; copy it again.")
        return out if index is None else out[0]

    def _read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        info = self._storage.get(MetadataIndex(key, chunk.offsets))
        if info is None:
            raise CheckpointError(f"{self.folder / METADATA_FILE} has no place for {key}; copy the checkpoint again.")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{key} in {self.folder} is compressed, which is not supported; save it uncompressed."
            )
        path = self.folder / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                tensor = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(f"{path} is damaged at {key} ({type(error).__name__}); copy it again.") from error
        if not isinstance(tensor, Tensor) or tensor.shape != chunk.sizes:
            raise CheckpointError(f"{path} is damaged at {key}: it holds another tensor; copy it again.")
        return tensor


def _needed_sizes(storage: Mapping[MetadataIndex, _StorageInfo]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for info in storage.values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    return sizes


# -- writing ----------------------------------------------------------------------------------


class TorchDistWriter:
    """Writes a checkpoint into an existing, empty folder: chunks of tensors in any order, then ``finish``."""

    def __init__(self, folder: Path) -> None:
        self.done_bytes = 0
        self._folder = folder
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._count = 0
        self._file = self._open()

    def _open(self) -> io.BufferedWriter:
        self._count += 1
        return (self._folder / f"__0_{self._count - 1}.distcp").open("wb")

    def write(self, key: str, chunk: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
        """Write a part of the tensor ``key`` of ``shape``, which begins at ``offsets``."""
        entry = self._entries.get(key)
        if entry is None:
            properties = TensorProperties(dtype=chunk.dtype)
            entry = self._entries[key] = TensorStorageMetadata(properties, torch.Size(shape), [])
        assert isinstance(entry, TensorStorageMetadata) and entry.size == torch.Size(shape)
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))
        self._append(MetadataIndex(key, offsets), chunk.detach().contiguous().clone())

    def write_object(self, key: str, value: object) -> None:
        """Write an object that Megatron stores besides tensors."""
        self._entries[key] = BytesStorageMetadata()
        self._append(MetadataIndex(key), value)

    def _append(self, index: MetadataIndex, value: object) -> None:
        if self._file.tell() > _FILE_BYTES:
            self._close()
            self._file = self._open()
        buffer, start = io.BytesIO(), self._file.tell()
        torch.save(value, buffer)
        self._file.write(buffer.getbuffer())
        self.done_bytes += value.nbytes if isinstance(value, Tensor) else 0
        self._storage[index] = _StorageInfo(self._file.name.rpartition("/")[2], start, buffer.tell())

    def _close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close the open file, of a checkpoint that will not be finished."""
        self._file.close()

    def finish(self, spec: DecoderSpec, iteration: int) -> None:
        """Write the metadata, which makes the checkpoint complete."""
        self._close()
        common = {"args": Namespace(**build_model_args(spec)), "iteration": iteration, "checkpoint_version": 3.0}
        torch.save(common, self._folder / COMMON_FILE)
        with (self._folder / METADATA_FILE).open("wb") as file:
            pickle.dump(Metadata(state_dict_metadata=self._entries, storage_data=self._storage), file)
        versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        write_json(self._folder / BACKEND_FILE, {"sharded_backend": "torch_dist", **versions})


def build_model_args(spec: DecoderSpec) -> dict[str, Any]:
    """Return the sizes of a model under the names of Megatron's arguments, which programs read from ``common.pt``."""
    return dict(_list_model_args(spec))


def _list_model_args(spec: DecoderSpec) -> Iterator[tuple[str, Any]]:
    mixer = spec.layers[0].mixer
    yield "num_layers", spec.num_layers
    yield "hidden_size", spec.hidden_size
    yield "vocab_size", spec.vocab_size
    yield "padded_vocab_size", spec.vocab_size
    yield "untie_embeddings_and_output_weights", not spec.tie_embeddings
    yield "norm_epsilon", spec.norm_eps
    yield "ckpt_format", "torch_dist"
    if isinstance(mixer, AttentionSpec | MlaSpec):
        groups = mixer.num_kv_heads if isinstance(mixer, AttentionSpec) else mixer.num_heads
        yield "num_attention_heads", mixer.num_heads
        yield "num_query_groups", groups
        yield "group_query_attention", groups != mixer.num_heads
        yield "kv_channels", mixer.head_dim if isinstance(mixer, AttentionSpec) else mixer.value_dim
        yield "multi_latent_attention", isinstance(mixer, MlaSpec)
    mlp = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, MlpSpec)), None)
    if mlp is not None:
        yield "ffn_hidden_size", mlp.size
    yield "num_experts", None if spec.moe is None else spec.moe.num_experts
    if spec.moe is not None:
        yield "moe_ffn_hidden_size", spec.moe.size
        yield "moe_router_topk", spec.moe.experts_per_token
