"""Vision inputs of a forward: which tokens of a packed batch are replaced by which features of which images.

Shapes: I placeholder tokens of a packed batch, F features of all its different images, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from miles.core.media import ImageInput


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
