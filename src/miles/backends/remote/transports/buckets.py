"""Weight buckets: a trainer's weights under Hugging Face names, in host copies of bounded size, and their manifests."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.multiprocessing
from safetensors.torch import save
from torch import Tensor

from miles.models.checkpoint.hf_packed import iter_quantized_hf
from miles.models.draft.spec import DRAFT_PREFIX
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.packed_map import build_packed_map
from miles.models.spec import DecoderSpec
from miles.sync.manifest import compute_digest

Named = tuple[str, Tensor]
QuantizedLayout = Literal["packed", "checkpoint"]
"""How quantized weights are sent: as ``packed_map`` names them (miles serve), or as a quantized checkpoint has them."""

_MLA_DOWN = re.compile(r"(.+)\.(?:q_a_proj|kv_a_proj_with_mqa)\.(.+)")


def iter_hf_named(
    spec: DecoderSpec, weights: Mapping[str, Tensor], layout: QuantizedLayout = "packed"
) -> Iterator[Named]:
    """Views of the weights under their checkpoint names; those of quantized weights depend on the layout.

    The weights of a draft head come last, under the names they have, or those of a checkpoint without the prefix.
    """
    if isinstance(spec, HfAdapterSpec):  # a transformers module has them already
        yield from weights.items()
        return
    if layout == "checkpoint":
        yield from iter_quantized_hf(spec, weights)
        yield from ((n.removeprefix(DRAFT_PREFIX), t) for n, t in weights.items() if n.startswith(DRAFT_PREFIX))
        return
    for ours, pieces in build_packed_map(spec).items():
        for piece in pieces if ours in weights else ():
            yield piece.hf_name, piece.view(weights[ours])
    yield from ((name, tensor) for name, tensor in weights.items() if name.startswith(DRAFT_PREFIX))


def find_load_group(name: str) -> str:
    """What the tensor is loaded together with: the same for both down-projections of MLA, else its own name.

    SGLang fuses these two when it loads them, and drops one that comes without the other.
    """
    match = _MLA_DOWN.fullmatch(name)
    return name if match is None else f"{match[1]}.{match[2]}"


def split_into_buckets(tensors: Iterable[Named], limit: int) -> list[list[Named]]:
    """The tensors in order, in buckets of at most ``limit`` bytes; a larger tensor has a bucket of its own.

    Tensors that are loaded together are in one bucket.
    """
    together: dict[str, list[Named]] = {}
    for name, tensor in tensors:
        together.setdefault(find_load_group(name), []).append((name, tensor))
    groups: list[list[Named]] = [[]]
    used = 0
    for named in together.values():
        size = sum(tensor.nbytes for _, tensor in named)
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1] += named
        used += size
    return groups


@dataclass(frozen=True)
class Bucket:
    """Host copies of tensors; read-only."""

    tensors: Mapping[str, Tensor]

    @cached_property
    def digests(self) -> dict[str, int]:
        return {name: compute_digest(tensor) for name, tensor in self.tensors.items()}

    @cached_property
    def as_safetensors(self) -> bytes:
        return save(dict(self.tensors))

    @cached_property
    def flat(self) -> Tensor:
        """The concatenated bytes of all tensors."""
        return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in self.tensors.values()])

    @property
    def metadata(self) -> dict[str, Any]:
        """Names, dtypes and shapes, in order."""
        return {
            "names": list(self.tensors),
            "dtypes": [dtype_name(tensor) for tensor in self.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
        }

    @cached_property
    def as_pickle(self) -> str:
        """SGLang's ``flattened_bucket``: the flat tensor as a file in shared memory, and the offsets of the tensors."""
        out = io.BytesIO()
        strategy = torch.multiprocessing.get_sharing_strategy()
        # With torch's default, file descriptors, a receiver that is not a child of this process fails.
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            ForkingPickler(out).dump({"flattened_tensor": self.flat, "metadata": self._list_offsets()})
        finally:
            torch.multiprocessing.set_sharing_strategy(strategy)
        return base64.b64encode(out.getvalue()).decode("ascii")

    def to_inline_pickle(self) -> str:
        """SGLang's ``flattened_bucket`` with the values in it, for a server on any machine."""
        flattened = {"flattened_tensor": self.flat, "metadata": self._list_offsets()}
        return base64.b64encode(pickle.dumps(flattened, protocol=4)).decode("ascii")

    def _list_offsets(self) -> list[SimpleNamespace]:
        offsets: list[SimpleNamespace] = []
        start = 0
        for name, tensor in self.tensors.items():
            end = start + tensor.nbytes
            # SGLang reads attributes, and its unpickler knows this class.
            offsets.append(
                SimpleNamespace(
                    name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes
                )
            )
            start = end
        return offsets

    def drop_encodings(self) -> None:
        """Free the serialized forms; the tensors stay."""
        for name in ("as_safetensors", "flat", "as_pickle"):
            self.__dict__.pop(name, None)


class ShapeManifest(dict[str, Tensor]):
    """Tensors by name, whose shapes and dtypes start an update. Without ``full`` servers keep all other tensors.

    ``keeps``: only those of the tensors that have changed will be sent. ``label`` names the version.
    """

    full = True
    keeps = False
    label = ""

    @cached_property
    def begin_body(self) -> bytes:
        """The request that begins the update, encoded once for all servers."""
        entries = [
            {"name": name, "shape": list(tensor.shape), "dtype": dtype_name(tensor)} for name, tensor in self.items()
        ]
        return json.dumps({"action": "begin", "whole": self.full, "keeps": self.keeps, "entries": entries}).encode()


class DigestManifest(dict[str, int]):
    """The expected digest of each tensor."""

    @cached_property
    def verify_body(self) -> bytes:
        """The request that verifies the update, encoded once for all servers."""
        digests = {name: str(digest) for name, digest in self.items()}
        return json.dumps({"action": "verify", "digests": digests}).encode()


def pack_bucket(group: Sequence[Named]) -> Bucket:
    """Host copies of some tensors, with their digests.

    Tensors with larger elements come first, so that each begins at a multiple of its element size in the flat bytes.
    """
    ordered = sorted(group, key=lambda named: -named[1].element_size())
    with torch.no_grad():
        bucket = Bucket({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in ordered})
        assert bucket.digests is not None  # computed here, while the previous bucket is sent
    return bucket


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


GetWeights = Callable[[], Mapping[str, Tensor]]
"""Returns the trainer's current weights."""
