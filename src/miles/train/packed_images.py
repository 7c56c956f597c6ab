"""Images of a packed micro-batch: a model's vision inputs and multimodal rope positions (M-RoPE), from its samples.

``_T`` packed input tokens, ``_P`` input tokens of all samples without prefix sharing, ``_I`` placeholder tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.core.errors import MilesError, UsageError
from miles.core.media import Images
from miles.core.types import Sample
from miles.models.spec import DecoderSpec
from miles.models.vision.inputs import VisionInputs, build_vision_inputs
from miles.models.vision.positions import compute_rope_positions, compute_visible_ends


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedImages:
    """The input tokens and the images of each sample of a micro-batch, on the host.

    Possibly no sample has one: if any sample of a global batch has an image, all its micro-batches are computed with
    the vision tower, whose shards the ranks gather together. ``slot_P`` is the place of each sample's tokens in the
    prefix tree, None if no prefix is shared.
    """

    tokens: tuple[NDArray[np.int32], ...]
    images: tuple[Images, ...]
    slot_P: NDArray[np.int64] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no sample has an image."""
        return not any(self.images)

    def select(self, chosen: Sequence[int], slot_P: NDArray[np.int64] | None) -> PackedImages:
        """Return the ``chosen`` samples, in the prefix tree of these."""
        return PackedImages(
            tokens=tuple(self.tokens[i] for i in chosen), images=tuple(self.images[i] for i in chosen), slot_P=slot_P
        )

    def build_positions(self, spec: DecoderSpec) -> NDArray[np.int64] | None:
        """Return the positions of the packed tokens in time, height and width, [3, T]; None for sequential positions.

        Shared tokens have the same positions in all their samples, because these depend on earlier tokens only.
        """
        if spec.vision is None or spec.vision.positions == "sequential":
            return None
        parts = [compute_rope_positions(spec, *pair)[0] for pair in zip(self.tokens, self.images, strict=True)]
        positions_3P = np.concatenate(parts, axis=1)
        if self.slot_P is None:
            return positions_3P
        positions_3T = np.empty((len(positions_3P), int(self.slot_P.max()) + 1), np.int64)
        positions_3T[:, self.slot_P] = positions_3P
        return positions_3T

    def check_context_parallel(self, spec: DecoderSpec) -> None:
        """UsageError if images attend in both directions: a rank's tokens attend to earlier tokens only."""
        if not self.is_empty and spec.vision is not None and spec.vision.bidirectional_spans:
            raise UsageError(
                f"--context-parallel-size does not support images of a {spec.family} model, whose tokens attend to "
                "each other in both directions; set it to 1."
            )

    def build_visible_ends(self, spec: DecoderSpec, padding: int = 0) -> NDArray[np.int64] | None:
        """Return one past the last position that each packed token attends to, [T]; None if attention is causal.

        ``padding`` tokens follow as a sequence of their own.
        """
        if self.is_empty or spec.vision is None or not spec.vision.bidirectional_spans:
            return None
        samples = zip(self.tokens, self.images, strict=True)
        parts = [(compute_visible_ends(spec, *pair), len(pair[0])) for pair in samples]
        ends_T = np.concatenate([np.arange(1, n + 1) if ends is None else ends for ends, n in parts])
        if self.slot_P is not None:
            ends_P, ends_T = ends_T, np.empty(int(self.slot_P.max()) + 1, np.int64)
            ends_T[self.slot_P] = ends_P
        return np.concatenate((ends_T, np.arange(1, padding + 1)))

    def build_vision_inputs(self, spec: DecoderSpec, device: torch.device) -> VisionInputs:
        """Return the inputs of the vision tower: each different image once, and where its features go."""
        if spec.vision is None:
            raise UsageError(
                f"the batch has images, but a model of the family {spec.family} takes none; use a vision-language "
                "model as policy, reference, critic and teacher."
            )
        starts = accumulate(map(len, self.tokens), initial=0)
        sequences = list(zip(starts, self.tokens, self.images, strict=False))
        inputs = build_vision_inputs(spec, sequences, torch.device("cpu"))
        if inputs is None:
            none_I = torch.zeros(0, dtype=torch.int64, device=device)
            return VisionInputs(token_I=none_I, feature_I=none_I)
        token_I, feature_I = inputs.token_I.numpy(), inputs.feature_I.numpy()
        if self.slot_P is not None:
            token_I, first_I = np.unique(self.slot_P[token_I], return_index=True)
            feature_I = feature_I[first_I]
        return replace(
            inputs,
            token_I=torch.from_numpy(token_I).to(device),
            feature_I=torch.from_numpy(feature_I).to(device),
        )


def prepare_positions(
    packed: PackedImages | None, spec: DecoderSpec, positions_T: Tensor, *, padding: int = 0
) -> Tensor:
    """Return the positions that a model of ``spec`` takes: ``positions_T``, or [3, T] if it takes M-RoPE positions.

    The last ``padding`` tokens of ``positions_T`` belong to no sample and keep theirs.
    """
    positions = None if packed is None else packed.build_positions(spec)
    if positions is None:
        return positions_T
    positions_3T = positions_T.expand(len(positions), -1).clone()
    positions_3T[:, : positions_T.shape[0] - padding] = torch.from_numpy(positions).to(positions_T.device)
    return positions_3T


def select_range(vision: VisionInputs, place_T: Tensor, first: int, count: int) -> VisionInputs:
    """Return the inputs of a rank that has the tokens whose ``place_T`` is among ``count`` places from ``first`` on.

    Images without a token on the rank are left out.
    """
    device = vision.token_I.device
    sizes = torch.tensor([image.num_features for image in vision.images], dtype=torch.int64, device=device)
    place_I = place_T[vision.token_I] - first
    here_I = ((place_I >= 0) & (place_I < count)).nonzero()[:, 0]
    feature_I = vision.feature_I[here_I]
    image_I = torch.searchsorted(sizes.cumsum(0), feature_I, right=True)
    used = torch.zeros(len(sizes), dtype=torch.bool, device=device)
    used[image_I] = True
    # The features of images that are left out are missing before those of later images.
    missing = torch.where(used, 0, sizes).cumsum(0)
    return VisionInputs(
        token_I=place_I[here_I],
        feature_I=feature_I - missing[image_I],
        images=[image for image, kept in zip(vision.images, used.tolist(), strict=True) if kept],
    )


def truncate_images(sample: Sample, length: int) -> Images:
    """Return the images within the first ``length`` tokens of a sample; none of them is cut (``check_images``)."""
    return tuple(placed for placed in sample.images if placed.start < length)


def check_images(sample: Sample) -> None:
    """MilesError if a sample trains on a token of an image: features replace it, so that nothing can sample it."""
    for placed in sample.images:
        if sample.mask[placed.start : placed.end].any():
            raise MilesError(
                f"trajectory {sample.trajectory} of prompt {sample.prompt_id} trains on the tokens of an image, from "
                f"token {placed.start} on; custom generate and advantage functions must leave them untrained."
            )
