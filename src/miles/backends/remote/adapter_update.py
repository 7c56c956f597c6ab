"""Weight update by LoRA adapters (SGLang's endpoints): each version is a new one, loaded while the server generates.

Nothing changes for requests before ``commit``, which has new ones name the new adapter. Requests in flight end with the
adapter that they began with, so that each has one version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from miles.backends.remote.client import RequestRejected, ServerInfo, SglangClient
from miles.backends.remote.pool.engine_pool import EngineSlot
from miles.backends.remote.sglang_lora import AdapterFormat
from miles.backends.remote.transports.buckets import Bucket, DigestManifest, ShapeManifest
from miles.core.errors import CheckpointError
from miles.models.checkpoint.peft import peft_tensor_name
from miles.models.checkpoint.safetensors_io import stored_tensors
from miles.models.lora.adapters import encode_factor

__all__ = ["AdapterUpdate"]


class AdapterUpdate:
    """Implements UpdateProtocol for ``--enable-lora``; tensors that are no factors stay as the server loaded them.

    The server computes the SHA-256 of every tensor that it received. If one is wrong, SGLang exits and ours rejects it.
    """

    requires_pause = False
    overwritten = False
    names_versions = True

    def __init__(
        self, slot: EngineSlot, client: SglangClient, seconds: float, *, info: ServerInfo, adapter: AdapterFormat
    ) -> None:
        self.slot = slot
        self.client = client
        self._seconds = seconds
        self._info = info
        self._format = adapter
        self._factors: dict[str, Tensor] = {}
        self._name = ""
        self._is_loaded = False

    async def begin(self, shapes: ShapeManifest) -> None:
        if self._format.problem is not None and self._info.kind == "sglang":
            raise RequestRejected(
                f"{self.client.name} is stock SGLang, but {self._format.problem}; choose other "
                "--target-modules, or remove --no-lora-merge"
            )
        if self._info.max_lora_rank is None or self._info.max_lora_rank < self._format.rank:
            raise RequestRejected(
                f"{self.client.name} has no room for adapters of rank {self._format.rank}; start it with "
                f"--enable-lora --max-lora-rank {self._format.rank} and --lora-target-modules "
                f"{' '.join(self._format.config['target_modules'])}"
            )
        missing = next((name for name in self._format.names if name not in shapes), None)
        if missing is not None:
            raise RequestRejected(f"{self.client.name} is to be sent an adapter without {missing}")
        self._check_base()
        self.client.adapters.keep = max(1, self._format.num_versions)
        self._factors = {}
        self._name = shapes.label

    def _check_base(self) -> None:
        """Raise unless the server's checkpoint has the matrices that the factors are for, if it can be read here."""
        try:
            stored = stored_tensors(Path(self._info.model_path))
        except CheckpointError:
            return
        for name in self._format.names:
            if name in self._format.experts:
                continue
            matrix = name.rpartition(".lora_")[0] + ".weight"
            if matrix not in stored:
                raise RequestRejected(
                    f"{self.client.name} serves {self._info.model_path}, which has no {matrix} to apply an adapter to"
                )

    async def send_bucket(self, bucket: Bucket) -> None:
        self._factors |= {name: tensor for name, tensor in bucket.tensors.items() if name in self._format.names}

    async def announce_bucket(self, bucket: Bucket, group: str) -> None:
        raise RequestRejected(f"{self.client.name} takes adapters in requests only; use --update-weight-transport auto")

    async def load_from_disk(self, folder: Path) -> None:
        raise RequestRejected(f"{self.client.name} takes adapters in requests only; use --update-weight-transport auto")

    async def verify(self, digests: DigestManifest) -> str | None:
        """Load the adapter under the name of its version, which no request uses before ``commit``."""
        tensors = self._build_tensors()
        await self.client.adapters.wait_unloaded()
        # A name may be left from before a connection was lost; to unload it could wait for a request that was lost too.
        taken = await self.client.list_adapters()
        self._name = next(name for name in _list_names(self._name) if name not in taken)
        await self.client.load_adapter(
            self._name,
            self._format.config,
            Bucket(tensors),
            _compute_checksums(tensors),
            ranks=self._info.ranks,
            seconds=self._seconds,
        )
        self._is_loaded = True
        self._factors = {}
        return None

    async def commit(self, label: str) -> None:
        """Have new requests use the new adapter."""
        body = {"new_version": label, "abort_all_requests": False}
        await self.client.request("POST", "/update_weight_version", body, seconds=self._seconds)
        self.client.adapters.switch(self._name)
        self._is_loaded = False

    def _build_tensors(self) -> dict[str, Tensor]:
        dtype = next(iter(self._factors.values())).dtype
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._factors.items():
            experts = self._format.experts.get(name)
            if experts is None:
                tensors[self._format.names[name]] = tensor
                continue
            if experts.target.is_stacked:
                tensor = encode_factor(tensor, is_a=experts.is_a, target=experts.target)
            tensors |= {peft_tensor_name(piece.hf_name): piece.view(tensor).contiguous() for piece in experts.pieces}
        return tensors | {name: torch.zeros(shape, dtype=dtype) for name, shape in self._format.zeros.items()}

    async def rollback(self) -> None:
        if self._is_loaded:
            await self.client.unload_adapter(self._name, self._seconds)
        self._is_loaded = False
        self._factors = {}


def _list_names(label: str) -> Iterator[str]:
    """Names for the adapter of a version: its label, then others."""
    yield label
    yield from (f"{label}.{number}" for number in count(1))


def _compute_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
