"""Adapters that come to an engine: added to the base it keeps of some matrices.

A base is what the engine computes with when adapters first come, or what the checkpoint it was started from holds:
whichever has the digest the sender says. It takes the memory of those matrices once more, for as long as the engine is.

Shapes: I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from miles.backends.native.engine import NativeEngine
from miles.backends.native.server.weights import all_by_name, index_of
from miles.core.errors import MilesError, SyncError
from miles.models import hub, names
from miles.models.foreign.spec import ForeignSpec
from miles.models.lora import merge
from miles.sync.adapters import Parcel
from miles.sync.manifest import digests


class Merging:
    """The bases an engine keeps; ``folder`` is the checkpoint it was started from.

    ``ranks`` that share the engine's model have no place for matrices that are whole.
    """

    def __init__(self, engine: NativeEngine, ranks: int, folder: Callable[[], Path]) -> None:
        self._engine, self._ranks, self._folder = engine, ranks, folder
        self._base: dict[str, Tensor] = {}
        self._digests: dict[str, int] = {}

    @torch.no_grad()
    def merged(self, parcel: Parcel) -> dict[str, Tensor]:
        """The matrices that are meant, as they are to be; refuses (SyncError) where there is no such base here."""
        if isinstance(self._engine.spec, ForeignSpec):
            raise SyncError("A model that transformers computes takes no adapters; send tensors instead.")
        if self._ranks > 1:
            raise SyncError(f"An engine that {self._ranks} ranks share takes no adapters; send tensors instead.")
        self._have(parcel.base)
        found: dict[str, Tensor] = {}
        for name in parcel.base:
            base_OI = self._base[name]
            found[name] = base_OI if name not in parcel.factors else self._sum(name, base_OI, parcel)
        return found

    def _sum(self, name: str, base_OI: Tensor, parcel: Parcel) -> Tensor:
        a_rI, b_Or = (factor.to(base_OI.device) for factor in parcel.factors[name])
        if base_OI.shape != (len(b_Or), a_rI.shape[1]):
            raise SyncError(f"The adapter of {name} is for {len(b_Or)} by {a_rI.shape[1]}, not {tuple(base_OI.shape)}.")
        out_OI = torch.empty_like(base_OI)
        merge(out_OI, base_OI, b_Or, a_rI, parcel.scale)
        return out_OI

    def _have(self, wanted: Mapping[str, int]) -> None:
        """Keep the bases that are ``wanted``, by digest."""
        missing = {name for name, number in wanted.items() if self._digests.get(name) != number}
        if not missing:
            return
        index = index_of(self._engine.spec)
        unknown = next((name for name in missing if name not in index), None)
        if unknown is not None:
            raise SyncError(f"{unknown} is not a tensor of this model.")
        self._take(all_by_name(self._engine.spec, self._engine.weights(), missing), wanted)
        missing = {name for name in missing if self._digests.get(name) != wanted[name]}
        for name, tensor in self._stored(missing):
            self._take({name: tensor}, wanted)
        other = next((name for name in missing if self._digests.get(name) != wanted[name]), None)
        if other is not None:
            raise SyncError(
                f"Neither this engine nor {self._folder()} has the {other} that adapters are to be added to."
            )

    def _take(self, tensors: Mapping[str, Tensor], wanted: Mapping[str, int]) -> None:
        for name, number in digests(tensors).items():
            if number == wanted[name]:
                self._base[name] = tensors[name].detach().clone(memory_format=torch.contiguous_format)
                self._digests[name] = number

    def _stored(self, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Of the checkpoint, one of our matrices at a time."""
        if not wanted:
            return
        spec, weights = self._engine.spec, self._engine.weights()
        like = weights[list(weights)[1]]
        pieces = names.pieces(spec)
        try:
            for ours, tensor in hub.load_slices(self._folder(), rank=0, world=1, device=like.device, dtype=like.dtype):
                for piece in pieces.get(ours, ()):
                    if piece.hf_name in wanted:
                        yield piece.hf_name, piece.of(tensor)
        except (MilesError, OSError) as error:
            raise SyncError(f"{self._folder()} cannot be read for what adapters are added to: {error}") from error
