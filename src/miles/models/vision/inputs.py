"""Vision inputs of a forward: which tokens of a packed batch are replaced by which features of which images.

Shapes: I placeholder tokens of a packed batch, F features of all its different images, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.core.media import ImageInput, Images, find_placeholders
from miles.models.spec import DecoderSpec
from miles.models.vision.positions import get_placeholder


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFeatures:
    """Output of a vision tower for some images, concatenated in their order.

    ``deepstack`` features are added to the hidden states of the placeholders after the first decoder layers, one each.
    """

    embeds_FD: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def select(self, rows: Tensor) -> VisionFeatures:
        """Return some rows."""
        return VisionFeatures(
            embeds_FD=self.embeds_FD.index_select(0, rows),
            deepstack=tuple(each.index_select(0, rows) for each in self.deepstack),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInputs:
    """The images of a packed batch: token ``token_I[i]`` is replaced by feature ``feature_I[i]``.

    Either ``images``, each different image once, which the decoder encodes (with gradients, if its tower is trained),
    or ``features``, which were encoded before.
    """

    token_I: Tensor
    feature_I: Tensor
    images: Sequence[ImageInput] = ()
    features: VisionFeatures | None = None


def build_vision_inputs(
    spec: DecoderSpec, sequences: Sequence[tuple[int, NDArray[Any], Images]], device: torch.device | str
) -> VisionInputs | None:
    """Build the vision inputs of a batch from the offset, the tokens and the images of each sequence.

    The tokens of a sequence are at its offset on in the batch. Images of equal digest are encoded once. None if no
    sequence has an image; ValueError if an image has not as many placeholder tokens as features.
    """
    first: dict[str, int] = {}
    images: list[ImageInput] = []
    features = 0
    token_parts: list[NDArray[np.int64]] = []
    feature_parts: list[NDArray[np.int64]] = []
    for offset, tokens, placed_images in sequences:
        for placed in placed_images:
            image = placed.image
            if spec.vision is None:
                raise ValueError(f"a sequence has an image, but a {spec.family} model has no vision tower")
            if image.digest not in first:
                first[image.digest] = features
                images.append(image)
                features += image.num_features
            token_parts.append(offset + find_placeholders(tokens, placed, get_placeholder(spec.vision, image)))
            feature_parts.append(first[image.digest] + np.arange(image.num_features))
    if not images:
        return None
    token_I, feature_I = (
        torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True) for parts in (token_parts, feature_parts)
    )
    return VisionInputs(token_I=token_I, feature_I=feature_I, images=tuple(images))
