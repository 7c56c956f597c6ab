"""New weights for a running engine: by Hugging Face names, all of them or some, from disk, a body or a group of ranks.

Whatever comes, the engine is given a whole publication through its own doors: what did not come stays as it is, what
came is checked, and it flips to all of it at once or not at all.
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

from miles.backends.native.engine import NativeEngine
from miles.core.errors import SyncError, UsageError
from miles.core.types import Version
from miles.models import hub, names
from miles.models.files import read_config
from miles.models.foreign.spec import ForeignSpec
from miles.models.pieces import Piece, shape_of
from miles.models.spec import DecoderSpec
from miles.sync.manifest import Entry, Manifest, digests
from miles.sync.publish import Publication

T = TypeVar("T")
Index = Mapping[str, tuple[str, Piece]]


class Beside:
    """Implements cluster.local.Run: work happens on a thread that is not the event loop's."""

    apart = True

    async def __call__(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    def close(self) -> None: ...


@lru_cache(maxsize=8)
def index_of(spec: DecoderSpec) -> Index:
    """Their name -> ours and which part of ours it is."""
    found = {piece.hf_name: (ours, piece) for ours, pieces in names.pieces(spec).items() for piece in pieces}
    for ours, theirs in names.stacked(spec).items():
        shape = shape_of(names.pieces(spec)[ours])
        found[theirs] = (ours, Piece(theirs, shape, 0, shape[0]))
    return found


def index_for(spec: DecoderSpec, current: Mapping[str, Tensor]) -> Index:
    """The index of a model's tensors; a module of transformers' own has its names already."""
    return _own_names(current) if isinstance(spec, ForeignSpec) else index_of(spec)


def merged(spec: DecoderSpec, current: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``current`` with the ``given`` tensors in their places; what nothing came for is the very tensor it was."""
    index = _own_names(current) if isinstance(spec, ForeignSpec) else index_of(spec)
    fresh: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if name not in index:
            if not isinstance(spec, ForeignSpec) and names.ignorable(spec, name):
                continue
            raise SyncError(f"{name} is not a tensor of this model.")
        ours, piece = index[name]
        if tuple(tensor.shape) != piece.shape:
            raise SyncError(f"{name} has shape {tuple(tensor.shape)}, but this model's has {piece.shape}.")
        if not tensor.is_floating_point():
            raise SyncError(f"{name} is {tensor.dtype}, but weights are floating-point numbers.")
        if ours not in fresh:
            fresh[ours] = current[ours].detach().clone()
        piece.of(fresh[ours]).copy_(tensor)
    return {**{name: tensor.detach() for name, tensor in current.items()}, **fresh}


def _own_names(current: Mapping[str, Tensor]) -> Index:
    return {name: (name, Piece(name, tuple(t.shape), 0, len(t))) for name, t in current.items()}


def by_name(spec: DecoderSpec, current: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The tensor they call ``name``; None where there is none."""
    index = _own_names(current) if isinstance(spec, ForeignSpec) else index_of(spec)
    if name not in index:
        return None
    ours, piece = index[name]
    return piece.of(current[ours].detach())


def all_by_name(spec: DecoderSpec, current: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """The tensors they call these names; one that is not there is left out."""
    index = index_for(spec, current)
    return {name: index[name][1].of(current[index[name][0]].detach()) for name in wanted if name in index}


def from_bytes(body: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return safetensors.torch.load(body)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise SyncError(f"The body is not a safetensors file: {error}.") from error


def small_one(engine: NativeEngine) -> Tensor:
    """One of an engine's tensors, to see where it keeps them and in what format; waits for the engine's ranks."""
    weights = engine.weights()
    return weights[list(weights)[1]]


class Intake:
    """Publishes to one engine; one publication at a time is its caller's duty.

    ``ranks`` that share the engine's model: what they share need not fit on one device.
    """

    def __init__(self, engine: NativeEngine, ranks: int) -> None:
        self._engine = engine
        self._ranks = ranks

    async def from_disk(self, folder: str) -> Version:
        """The weights of a checkpoint of the same architecture."""
        return await self._publish(lambda: self._read(Path(folder)))

    async def from_tensors(self, given: Mapping[str, Tensor]) -> Version:
        """Some or all tensors by their Hugging Face names."""
        engine = self._engine
        return await self._publish(lambda: merged(engine.spec, engine.weights(), given))

    async def from_placed(self, placed: Mapping[str, Tensor], known: Mapping[str, int]) -> Version:
        """Tensors by the engine's own names, as they are to be; those of ``known`` digests are not read again."""
        before = self._engine.version
        version = Version() if before is None else before.next()
        await asyncio.to_thread(self._flip, version, placed, known)
        return version

    def _flip(self, version: Version, placed: Mapping[str, Tensor], known: Mapping[str, int]) -> None:
        engine = self._engine
        tensors = {name: tensor.detach() for name, tensor in {**engine.weights(), **placed}.items()}
        found = {**digests({name: tensor for name, tensor in tensors.items() if name not in known}), **known}
        entries = tuple(
            Entry(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype), digest=found[name])
            for name, tensor in tensors.items()
        )
        try:
            engine.begin(Manifest(version=version, entries=entries))
            for name, tensor in tensors.items():
                engine.receive(name, tensor, found[name])
            engine.verify()
        except SyncError:
            engine.rollback()
            raise
        engine.commit()

    async def _publish(self, weights: Callable[[], Mapping[str, Tensor]]) -> Version:
        before = self._engine.version
        version = Version() if before is None else before.next()
        await Publication(weights=weights, engines=[self._engine], transport="made", run=Beside()).publish(version)
        return version

    def _read(self, folder: Path) -> Mapping[str, Tensor]:
        engine = self._engine
        if isinstance(engine.spec, ForeignSpec):
            raise SyncError("A model that transformers computes takes no weights from disk; send tensors instead.")
        if not (folder / "config.json").is_file():
            raise SyncError(f"{folder} is not a checkpoint: there is no config.json in it.")
        like = small_one(engine)
        device = like.device if self._ranks == 1 else "cpu"
        try:
            read_config(folder)
            return dict(hub.load_slices(folder, rank=0, world=1, device=device, dtype=like.dtype))
        except UsageError as error:
            raise SyncError(str(error)) from error


DTYPES = {
    name: kind
    for name, kind in vars(torch).items()
    if isinstance(kind, torch.dtype) and kind.is_floating_point and not name.startswith("_")
}
"""Words for formats of numbers, as a client may spell them: ``bfloat16``, ``half``."""
