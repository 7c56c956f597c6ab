"""LoRA merge: adapter factors that a sender publishes are merged into base matrices kept by the engine.

A base is what the engine computes with when adapters first arrive, or what its checkpoint has: whichever has the digest
the sender names. Bases take the memory of those matrices once more, for the engine's lifetime.

Shapes: I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.server.weights.update import build_spec_index, find_small_tensor, get_tensors
from miles.core.errors import MilesError, SyncError
from miles.models.checkpoint import hf, param_map
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.lora.adapters import merge
from miles.sync.adapters import AdapterPayload
from miles.sync.manifest import compute_digests


class LoraMerger:
    """The base matrices of an engine; ``get_folder`` returns the checkpoint it was started from."""

    def __init__(self, engine: NativeEngine, num_ranks: int, get_folder: Callable[[], Path]) -> None:
        self._engine = engine
        self._num_ranks = num_ranks
        self._get_folder = get_folder
        self._base: dict[str, Tensor] = {}
        self._digests: dict[str, int] = {}

    @torch.no_grad()
    def merge(self, payload: AdapterPayload) -> dict[str, Tensor]:
        """The merged matrices; refuses (SyncError) where the base is not available."""
        if isinstance(self._engine.spec, HfAdapterSpec):
            raise SyncError("A model run by transformers takes no adapters; send tensors instead.")
        if self._engine.spec.quantization is not None:
            raise SyncError("An engine with quantized weights takes no adapters; send tensors instead.")
        if self._num_ranks > 1:
            raise SyncError(f"An engine of {self._num_ranks} ranks takes no adapters; send tensors instead.")
        self._load_bases(payload.base)
        merged: dict[str, Tensor] = {}
        for name in payload.base:
            base_OI = self._base[name]
            merged[name] = base_OI if name not in payload.factors else self._merge_one(name, base_OI, payload)
        return merged

    def _merge_one(self, name: str, base_OI: Tensor, payload: AdapterPayload) -> Tensor:
        a_rI, b_Or = (factor.to(base_OI.device) for factor in payload.factors[name])
        if base_OI.shape != (len(b_Or), a_rI.shape[1]):
            raise SyncError(f"The adapter of {name} is for {len(b_Or)} by {a_rI.shape[1]}, not {tuple(base_OI.shape)}.")
        out_OI = torch.empty_like(base_OI)
        merge(out_OI, base_OI, b_Or, a_rI, payload.scale)
        return out_OI

    def _load_bases(self, digests: Mapping[str, int]) -> None:
        """Store the bases with these ``digests``."""
        missing = {name for name, digest in digests.items() if self._digests.get(name) != digest}
        if not missing:
            return
        index = build_spec_index(self._engine.spec)
        unknown = next((name for name in missing if name not in index), None)
        if unknown is not None:
            raise SyncError(f"{unknown} is not a tensor of this model.")
        self._store(get_tensors(self._engine.spec, self._engine.weights(), missing), digests)
        missing = {name for name in missing if self._digests.get(name) != digests[name]}
        for name, tensor in self._read_checkpoint(missing):
            self._store({name: tensor}, digests)
        absent = next((name for name in missing if self._digests.get(name) != digests[name]), None)
        if absent is not None:
            raise SyncError(
                f"Neither this engine nor {self._get_folder()} has the {absent} that the adapter belongs to."
            )

    def _store(self, tensors: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
        for name, digest in compute_digests(tensors).items():
            if digest == digests[name]:
                self._base[name] = tensors[name].detach().clone(memory_format=torch.contiguous_format)
                self._digests[name] = digest

    def _read_checkpoint(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the checkpoint, one of our parameters at a time."""
        if not names:
            return
        like, folder = find_small_tensor(self._engine), self._get_folder()
        slices = param_map.build_param_map(self._engine.spec)
        try:
            for own_name, tensor in hf.load_slices(folder, rank=0, world=1, device=like.device, dtype=like.dtype):
                for piece in slices.get(own_name, ()):
                    if piece.hf_name in names:
                        yield piece.hf_name, piece.view(tensor)
        except (MilesError, OSError) as error:
            raise SyncError(f"{folder} cannot be read for the base of adapters: {error}") from error
