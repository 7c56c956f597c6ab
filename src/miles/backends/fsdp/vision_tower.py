"""FSDP2 wrapping of the vision tower: ranks without images take part in its collectives.

The tower is one FSDP unit, gathered when a micro-batch is encoded. Tensor-parallel ranks each encode all images, and
context-parallel ranks those of their own tokens.

Shapes: D hidden of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import register_dataclass

from miles.core.media import ImageInput
from miles.models.vision.inputs import VisionFeatures
from miles.models.vision.tower import VisionTower

# FSDP looks for tensors in a module's output, to gather the weights again before its backward.
register_dataclass(VisionFeatures)


def accept_no_images(tower: VisionTower, width: int, num_deepstack: int) -> None:
    """Let ``tower`` encode no images: no features, from which its trained parameters get gradients of zero.

    A rank without images in a micro-batch thus gathers and reduces as the others do.
    """
    encode = tower.forward

    def forward(images: Sequence[ImageInput], *args: Any) -> VisionFeatures:
        if images:
            return encode(images, *args)
        parameters = list(tower.parameters())
        trained = [parameter.reshape(-1)[0] for parameter in parameters if parameter.requires_grad]
        zero = torch.stack(trained).sum() if trained else parameters[0].new_zeros(())
        none_0D = zero.expand(1, width)[:0]
        return VisionFeatures(embeds_FD=none_0D, deepstack=(none_0D,) * num_deepstack)

    tower.forward = forward
