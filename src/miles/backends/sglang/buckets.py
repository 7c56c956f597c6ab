"""A trainer's weights on their way to servers: by Hugging Face names, in buckets of bounded size, on the host."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import save
from torch import Tensor

from miles.models import names
from miles.models.foreign.spec import ForeignSpec
from miles.models.spec import DecoderSpec
from miles.sync.manifest import digest

Named = tuple[str, Tensor]


def hub_named(spec: DecoderSpec, weights: Mapping[str, Tensor]) -> Iterator[Named]:
    """Views of the weights by the names a checkpoint has for them; of those that are there."""
    if isinstance(spec, ForeignSpec):  # a module of transformers' own has them already
        yield from weights.items()
        return
    for ours, pieces in names.pieces(spec).items():
        for piece in pieces if ours in weights else ():
            yield piece.hf_name, piece.of(weights[ours])


def grouped(tensors: Iterable[Named], limit: int) -> list[list[Named]]:
    """The tensors in order, in runs of at most ``limit`` bytes; a larger tensor is a run of its own."""
    groups: list[list[Named]] = [[]]
    used = 0
    for name, tensor in tensors:
        if groups[-1] and used + tensor.nbytes > limit:
            groups.append([])
            used = 0
        groups[-1].append((name, tensor))
        used += tensor.nbytes
    return groups


@dataclass(frozen=True)
class Bucket:
    """Copies on the host, which nobody writes to."""

    tensors: Mapping[str, Tensor]

    @cached_property
    def digests(self) -> dict[str, int]:
        return {name: digest(tensor) for name, tensor in self.tensors.items()}

    @cached_property
    def as_safetensors(self) -> bytes:
        return save(dict(self.tensors))

    @cached_property
    def flat(self) -> Tensor:
        """The bytes of all one after the other."""
        return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in self.tensors.values()])

    @property
    def announced(self) -> dict[str, Any]:
        """Names, formats and shapes, in order."""
        return {
            "names": list(self.tensors),
            "dtypes": [dtype_of(tensor) for tensor in self.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
        }

    @cached_property
    def as_pickle(self) -> str:
        """SGLang's ``flattened_bucket``: the flat tensor by its file in shared memory, and what lies where in it."""
        places, start = [], 0
        for name, tensor in self.tensors.items():
            end = start + tensor.nbytes
            # SGLang reads attributes, and its unpickler knows this class.
            places.append(
                SimpleNamespace(
                    name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes
                )
            )
            start = end
        out, before = io.BytesIO(), torch.multiprocessing.get_sharing_strategy()
        # By descriptor, torch's default, a receiver that is no child of ours gets nothing, and ends.
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            ForkingPickler(out).dump({"flattened_tensor": self.flat, "metadata": places})
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
        return base64.b64encode(out.getvalue()).decode("ascii")

    def forget(self) -> None:
        """Let go of the forms it was sent in; the tensors stay."""
        for name in ("as_safetensors", "flat", "as_pickle"):
            self.__dict__.pop(name, None)


def packed(group: Sequence[Named]) -> Bucket:
    """Copies of a run of tensors, with their digests."""
    with torch.no_grad():
        bucket = Bucket({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in group})
        assert bucket.digests is not None  # computed here, beside whoever sends the bucket before
    return bucket


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


Weights = Callable[[], Mapping[str, Tensor]]
