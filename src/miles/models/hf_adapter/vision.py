"""Images of models run by transformers: features from the module's own ``get_image_features``, one image at a time.

Shapes: F features of some images, D hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles.core.media import ImageInput
from miles.models.activation_checkpointing import CheckpointFn
from miles.models.vision.inputs import VisionFeatures


class HfVisionTower:
    """The vision tower and projector inside a transformers module, with the interface of ``VisionTower``.

    Its parameters belong to the module. An image is encoded by itself, with the arrays that its processor returned.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, images: Sequence[ImageInput], checkpoint_fn: CheckpointFn | None = None) -> VisionFeatures:
        """Compute the features of images, concatenated in their order. Layers are recomputed by the decoder's rule."""
        if not images:
            raise ValueError("a vision tower was given no images to encode")
        return VisionFeatures(embeds_FD=torch.cat([self._encode(image) for image in images]))

    def check(self, image: ImageInput) -> None:
        """Raise a ValueError if the arrays of an image are not what the module takes."""
        if image.kind != "image":
            raise ValueError("--model-impl transformers takes no videos; pass their frames as images")
        if "pixel_values" not in image.arrays:
            raise ValueError("pixel_values is missing among the arrays of an image; use the checkpoint's processor")

    def _encode(self, image: ImageInput) -> Tensor:
        self.check(image)
        arrays = convert_arrays([image], self._module, self._module.get_image_features)
        found = self._module.get_image_features(**arrays)
        embeds = getattr(found, "pooler_output", found)
        parts = list(embeds) if isinstance(embeds, list | tuple) else [embeds]
        embeds_FD = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        if len(embeds_FD) != image.num_features:
            raise ValueError(
                f"{type(self._module).__name__} has {len(embeds_FD)} features for an image, but its processor expands "
                f"the placeholder to {image.num_features} tokens"
            )
        return embeds_FD


def convert_arrays(images: Sequence[ImageInput], module: Any, *functions: Any) -> dict[str, Tensor]:
    """The arrays of images that any of some functions has a parameter for, concatenated, on the module's device."""
    known = {name for function in functions for name in inspect.signature(function).parameters}
    found: dict[str, Tensor] = {}
    for name in images[0].arrays:
        if name in known:
            tensors = [torch.from_numpy(image.arrays[name].copy()) for image in images]
            joined = torch.cat(tensors).to(module.device)
            found[name] = joined.to(module.dtype) if joined.is_floating_point() else joined
    return found
