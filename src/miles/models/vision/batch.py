"""Vision inputs of packed batches: the images of several sequences, each different image once.

Shapes: I placeholder tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from miles.core.media import ImageInput, Images, find_placeholders
from miles.models.spec import DecoderSpec
from miles.models.vision.inputs import VisionInputs
from miles.models.vision.positions import get_placeholder


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
