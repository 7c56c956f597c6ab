"""The version that was committed last, on the host: for servers that join, and for those that must be put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.backends.sglang.buckets import Bucket, Named
from miles.backends.sglang.promised import Digests, Shapes
from miles.core.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A version as it was committed."""

    version: Version
    buckets: tuple[Bucket, ...]

    @property
    def shapes(self) -> Shapes:
        return Shapes(self.tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for bucket in self.buckets for name, tensor in bucket.tensors.items()}

    @property
    def digests(self) -> Digests:
        return Digests({name: number for bucket in self.buckets for name, number in bucket.digests.items()})

    def changed(self, version: Version, buckets: Sequence[Bucket]) -> Kept:
        """The next version: what came in ``buckets``, and all else as it is here."""
        fresh = {name: tensor for bucket in buckets for name, tensor in bucket.tensors.items()}
        numbers = {name: number for bucket in buckets for name, number in bucket.digests.items()}
        joined = [
            known({name: fresh.get(name, tensor) for name, tensor in old.tensors.items()}, {**old.digests, **numbers})
            for old in self.buckets
        ]
        return Kept(version=version, buckets=tuple(joined))

    def renewed(self, version: Version, groups: Sequence[Sequence[Named]], digests: Mapping[str, int]) -> Kept:
        """The next version in this one's own memory, written over where digests differ: this one is lost."""
        now = {name: tensor for group in groups for name, tensor in group}
        with torch.no_grad():
            for bucket in self.buckets:
                for name, place in bucket.tensors.items():
                    if digests[name] != bucket.digests[name]:
                        place.copy_(now[name].detach(), non_blocking=True)
            device = next(iter(now.values())).device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return Kept(version=version, buckets=tuple(known(bucket.tensors, digests) for bucket in self.buckets))


def moved(bucket: Bucket, before: Mapping[str, int]) -> Bucket:
    """What of a bucket has other digests than ``before``."""
    fresh = {name: tensor for name, tensor in bucket.tensors.items() if bucket.digests[name] != before.get(name)}
    return known(fresh, bucket.digests)


def known(tensors: Mapping[str, Tensor], digests: Mapping[str, int]) -> Bucket:
    """A bucket whose digests need not be taken again."""
    bucket = Bucket(tensors)
    bucket.__dict__["digests"] = {name: digests[name] for name in tensors}
    return bucket


class HostMemory:
    """Where a version that was sent from a device's memory is kept; the same memory each time, so one version at most.

    On an accelerator it is memory the device copies to by itself.
    """

    def __init__(self) -> None:
        self._flat: list[Tensor] = []

    def keep(self, groups: Sequence[Sequence[Named]], digests: Mapping[str, int]) -> list[Bucket]:
        """Copies of all; they hold until the next call."""
        with torch.no_grad():
            buckets = [self._bucket(i, group, digests) for i, group in enumerate(groups)]
            if any(tensor.is_cuda for _, tensor in groups[0]):
                torch.cuda.synchronize(groups[0][0][1].device)
        return buckets

    def _bucket(self, number: int, group: Sequence[Named], digests: Mapping[str, int]) -> Bucket:
        sizes = [-(-tensor.nbytes // 16) * 16 for _, tensor in group]
        if number == len(self._flat):
            self._flat.append(torch.empty(0, dtype=torch.uint8))
        if self._flat[number].numel() < sum(sizes):
            self._flat[number] = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=group[0][1].is_cuda)
        copies: dict[str, Tensor] = {}
        start = 0
        for (name, tensor), size in zip(group, sizes, strict=True):
            place = self._flat[number][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = place.copy_(tensor.detach(), non_blocking=True)
            start += size
        return known(copies, digests)
