"""Committed weights: a host copy of the last committed version, for servers that join and for rollbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.backends.remote.pool.engine_pool import weight_version_label
from miles.backends.remote.transports.buckets import (
    Bucket,
    DigestManifest,
    Named,
    ShapeManifest,
    find_load_group,
)
from miles.core.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedWeights:
    """The weights of a committed version, in buckets."""

    version: Version
    buckets: tuple[Bucket, ...]

    @property
    def shapes(self) -> ShapeManifest:
        shapes = ShapeManifest(self.tensors)
        shapes.label = weight_version_label(self.version)
        return shapes

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for bucket in self.buckets for name, tensor in bucket.tensors.items()}

    @property
    def digests(self) -> DigestManifest:
        return DigestManifest({name: digest for bucket in self.buckets for name, digest in bucket.digests.items()})

    def with_changes(self, version: Version, buckets: Sequence[Bucket]) -> CommittedWeights:
        """The next version: the tensors of ``buckets``, and all others as they are here."""
        changed = {name: tensor for bucket in buckets for name, tensor in bucket.tensors.items()}
        digests = {name: digest for bucket in buckets for name, digest in bucket.digests.items()}
        merged = [
            bucket_with_digests(
                {name: changed.get(name, tensor) for name, tensor in old.tensors.items()}, {**old.digests, **digests}
            )
            for old in self.buckets
        ]
        return CommittedWeights(version=version, buckets=tuple(merged))

    def overwrite(
        self, version: Version, groups: Sequence[Sequence[Named]], digests: Mapping[str, int]
    ) -> CommittedWeights:
        """The next version in the memory of this one, which is lost; only tensors with other digests are copied."""
        current = {name: tensor for group in groups for name, tensor in group}
        with torch.no_grad():
            for bucket in self.buckets:
                for name, target in bucket.tensors.items():
                    if digests[name] != bucket.digests[name]:
                        target.copy_(current[name].detach(), non_blocking=True)
            device = next(iter(current.values())).device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        buckets = tuple(bucket_with_digests(bucket.tensors, digests) for bucket in self.buckets)
        return CommittedWeights(version=version, buckets=buckets)


def select_changed(bucket: Bucket, before: Mapping[str, int]) -> Bucket:
    """The tensors of a bucket whose digests differ from ``before``, and those that are loaded together with them."""
    changed = {find_load_group(name) for name, digest in bucket.digests.items() if digest != before.get(name)}
    tensors = {name: tensor for name, tensor in bucket.tensors.items() if find_load_group(name) in changed}
    return bucket_with_digests(tensors, bucket.digests)


def bucket_with_digests(tensors: Mapping[str, Tensor], digests: Mapping[str, int]) -> Bucket:
    """A bucket with known digests, which are not computed again."""
    bucket = Bucket(tensors)
    bucket.__dict__["digests"] = {name: digests[name] for name in tensors}
    return bucket


class HostWeightBuffer:
    """Host memory for a version that was sent from device memory; reused, so it holds one version at most.

    It is pinned if the weights are on an accelerator.
    """

    def __init__(self) -> None:
        self._flat: list[Tensor] = []

    def copy(self, groups: Sequence[Sequence[Named]], digests: Mapping[str, int]) -> list[Bucket]:
        """Copies of all tensors, valid until the next call."""
        with torch.no_grad():
            buckets = [self._copy_bucket(i, group, digests) for i, group in enumerate(groups)]
            if any(tensor.is_cuda for _, tensor in groups[0]):
                torch.cuda.synchronize(groups[0][0][1].device)
        return buckets

    def _copy_bucket(self, number: int, group: Sequence[Named], digests: Mapping[str, int]) -> Bucket:
        sizes = [-(-tensor.nbytes // 16) * 16 for _, tensor in group]
        if number == len(self._flat):
            self._flat.append(torch.empty(0, dtype=torch.uint8))
        if self._flat[number].numel() < sum(sizes):
            self._flat[number] = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=group[0][1].is_cuda)
        copies: dict[str, Tensor] = {}
        start = 0
        for (name, tensor), size in zip(group, sizes, strict=True):
            target = self._flat[number][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = target.copy_(tensor.detach(), non_blocking=True)
            start += size
        return bucket_with_digests(copies, digests)
