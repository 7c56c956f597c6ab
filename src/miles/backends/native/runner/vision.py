"""Vision tower of the engine: encodes the images of a step in batches, and caches their features by digest.

Shapes: F features of some images, I placeholders of a step, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from miles.backends.native.engine.vision import VisionBatch
from miles.backends.native.runner.sampler import SendArrays
from miles.core.media import ImageInput
from miles.models.hf_adapter.vision import HfVisionTower
from miles.models.vision.inputs import VisionFeatures, VisionInputs
from miles.models.vision.tower import VisionTower


class FeatureCache:
    """Features of images by digest, at most ``max_bytes``; the least recently used are evicted first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._features: dict[str, VisionFeatures] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._features

    def __len__(self) -> int:
        return len(self._features)

    def use(self, digest: str, features: VisionFeatures | None = None) -> VisionFeatures:
        """Return the features of an image, which are ``features`` if it is new here; it is now the last used."""
        found = self._features.pop(digest, None)
        if found is None:
            assert features is not None
            found = features
            self.num_bytes += _count_bytes(features)
        self._features[digest] = found
        return found

    def evict(self) -> None:
        """Drop features until they fit."""
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= _count_bytes(self._features.pop(next(iter(self._features))))

    def clear(self) -> None:
        self._features.clear()
        self.num_bytes = 0


class ImageEncoder:
    """Runs a vision tower on images that have no features yet, at most ``max_features`` per call unless one has more.

    One that has more than ``max_image_features`` does not fit into the cache.
    ``num_encoded`` images were encoded so far. On all ranks that get the same batches the cache has the same images.
    """

    def __init__(
        self,
        tower: VisionTower | HfVisionTower,
        cache: FeatureCache,
        *,
        max_features: int,
        max_image_features: int,
        device: torch.device,
    ) -> None:
        self.cache = cache
        self.num_encoded = 0
        self._tower = tower
        self._max_features = max_features
        self._max_image_features = max_image_features
        self._device = device

    def check(self, image: ImageInput) -> None:
        """Raise a ValueError if the tower cannot encode an image, or the cache cannot hold its features."""
        self._tower.check(image)
        if image.num_features > self._max_image_features:
            raise ValueError(
                f"it has {image.num_features} features, but --engine-vision-cache-mib has room for "
                f"{self._max_image_features}; raise it, or make the image smaller"
            )

    def build_inputs(self, batch: VisionBatch, send: SendArrays) -> VisionInputs:
        """Return the features of a step, encoding images that are new."""
        images = dict[str, ImageInput]()
        for image in batch.images:
            images.setdefault(image.digest, image)
        missing = [image for digest, image in images.items() if digest not in self.cache]
        encoded = {digest: features for each in self._split(missing) for digest, features in self._encode(each)}
        features = {digest: self.cache.use(digest, encoded.get(digest)) for digest in images}
        parts = [
            _slice(features[image.digest], first, first + count)
            for image, first, count in zip(batch.images, batch.first_J.tolist(), batch.count_J.tolist(), strict=True)
        ]
        # What this step reads is in ``parts`` by now, so nothing that it needs is evicted.
        self.cache.evict()
        (token_I,) = send(batch.token_I)
        return VisionInputs(
            token_I=token_I,
            feature_I=torch.arange(len(batch.token_I), device=self._device),
            features=VisionFeatures(
                embeds_FD=_concatenate([part.embeds_FD for part in parts]),
                deepstack=tuple(map(_concatenate, zip(*(part.deepstack for part in parts), strict=True))),
            ),
        )

    def strip_cached(self, batch: VisionBatch) -> VisionBatch:
        """Return a batch without the arrays of images whose features are here, and of those that came before in it."""
        seen = set[str]()
        images = list[ImageInput]()
        for image in batch.images:
            known = image.digest in self.cache or image.digest in seen
            images.append(replace(image, arrays={}) if known else image)
            seen.add(image.digest)
        return replace(batch, images=tuple(images))

    def _split(self, images: Sequence[ImageInput]) -> Iterator[list[ImageInput]]:
        """Yield images in order, as many at a time as the tower takes."""
        group, count = list[ImageInput](), 0
        for image in images:
            if group and count + image.num_features > self._max_features:
                yield group
                group, count = [], 0
            group.append(image)
            count += image.num_features
        if group:
            yield group

    def _encode(self, images: Sequence[ImageInput]) -> Iterator[tuple[str, VisionFeatures]]:
        features = self._tower(images)
        self.num_encoded += len(images)
        start = 0
        for image in images:
            part = _slice(features, start, start + image.num_features)
            start += image.num_features
            # A view would keep the memory of the whole call.
            yield image.digest, part if len(images) == 1 else _clone(part)


def _slice(features: VisionFeatures, start: int, end: int) -> VisionFeatures:
    return VisionFeatures(
        embeds_FD=features.embeds_FD[start:end], deepstack=tuple(each[start:end] for each in features.deepstack)
    )


def _clone(features: VisionFeatures) -> VisionFeatures:
    return VisionFeatures(
        embeds_FD=features.embeds_FD.clone(), deepstack=tuple(each.clone() for each in features.deepstack)
    )


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _count_bytes(features: VisionFeatures) -> int:
    return sum(each.numel() * each.element_size() for each in (features.embeds_FD, *features.deepstack))
