"""Images of requests in the engine: prefix keys, placeholders, M-RoPE positions, and the features that a step needs.

Shapes: T tokens of a prompt (in a batch: new tokens), I placeholders, J runs of features of one image, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from miles.core.media import ImageInput, Images, PlacedImage, check_placement, find_placeholders, prefix_keys
from miles.models.spec import DecoderSpec
from miles.models.vision.positions import compute_rope_positions, compute_visible_ends, get_placeholder

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImages:
    """The images of one prompt.

    ``keys`` are the prefix cache's keys of the prompt. Token ``placeholder_I[i]`` is replaced by feature
    ``feature_I[i]`` of image ``image_I[i]``, in ascending order. ``rope_positions_3T`` are the prompt's positions if
    the model's are those of M-RoPE; tokens from ``end`` on, where the last image ends, have their index plus
    ``rope_offset`` on all axes. ``visible_ends_T`` is one past the last token that each token of the prompt attends to;
    None if attention is causal.
    """

    images: Images
    keys: list[int]
    placeholder_I: Ints
    image_I: Ints
    feature_I: Ints
    rope_positions_3T: Ints | None
    rope_offset: int
    visible_ends_T: Ints | None = None

    @property
    def end(self) -> int:
        """One past the last token of the last image."""
        return self.images[-1].end

    def slice_rope_positions(self, start: int, end: int) -> Ints:
        """Return the positions [3, end - start] of tokens of prompt and response."""
        assert self.rope_positions_3T is not None
        prompt_3T = self.rope_positions_3T[:, start:end]
        first = max(start, self.rope_positions_3T.shape[1])
        rest_3T = np.broadcast_to(np.arange(first, end) + self.rope_offset, (3, max(0, end - first)))
        return np.concatenate((prompt_3T, rest_3T), 1)

    def limit_chunk(self, start: int, end: int) -> int:
        """Return the end of a prefill chunk that would end with ``end``, but must not end within a bidirectional span.

        It ends before the span, or behind it if the chunk starts there.
        """
        if self.visible_ends_T is None or end > len(self.visible_ends_T) or self.visible_ends_T[end - 1] == end:
            return end
        span_end = int(self.visible_ends_T[end - 1])
        span_start = int(np.searchsorted(self.visible_ends_T, span_end))
        return span_start if span_start > start else span_end

    def slice_visible_ends(self, start: int, end: int) -> Ints:
        """Return one past the last token that each of tokens ``start`` to ``end`` of prompt and response attends to."""
        own_T = np.arange(start + 1, end + 1)
        if self.visible_ends_T is not None:
            prompt_T = self.visible_ends_T[start:end]
            own_T[: len(prompt_T)] = prompt_T
        return own_T

    def iter_feature_runs(self, start: int, end: int) -> Iterator[tuple[ImageInput, int, Ints]]:
        """Yield for each image among tokens ``start`` to ``end`` its first feature there, and the placeholders."""
        lo, hi = np.searchsorted(self.placeholder_I, (start, end)).tolist()
        bounds = [lo, *(lo + 1 + np.flatnonzero(np.diff(self.image_I[lo:hi]))).tolist(), hi]
        for first, last in pairwise(bounds):
            if first < last:
                image = self.images[int(self.image_I[first])].image
                yield image, int(self.feature_I[first]), self.placeholder_I[first:last]


def place_images(spec: DecoderSpec, prompt_T: Ints, images: Sequence[PlacedImage]) -> PromptImages:
    """Return the images of a prompt as the engine needs them; raise a ValueError if they do not fit its tokens."""
    vision = spec.vision
    assert vision is not None
    check_placement(images, len(prompt_T))
    found = [find_placeholders(prompt_T, placed, get_placeholder(vision, placed.image)) for placed in images]
    positions_3T, offset = compute_rope_positions(spec, prompt_T, images) if vision.positions == "mrope" else (None, 0)
    return PromptImages(
        images=tuple(images),
        keys=prefix_keys(prompt_T, images).tolist(),
        placeholder_I=np.concatenate(found),
        image_I=np.repeat(np.arange(len(images)), [len(each) for each in found]),
        feature_I=np.concatenate([np.arange(len(each)) for each in found]),
        rope_positions_3T=positions_3T,
        rope_offset=offset,
        visible_ends_T=compute_visible_ends(spec, prompt_T, images),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionBatch:
    """The features that enter one step, in the order of its rows ``token_I``.

    They are ``count_J[j]`` features of ``images[j]`` from ``first_J[j]`` on, for each j. An image may occur several
    times. Ranks that have the features of an image need no arrays of it.
    """

    token_I: Ints
    images: tuple[ImageInput, ...]
    first_J: Ints
    count_J: Ints


def build_vision_batch(rows: Iterable[tuple[PromptImages, int, int, int]]) -> VisionBatch | None:
    """Return the features of a step; each of ``rows`` has images, first and last token, and the first one's row."""
    runs = [
        (image, first, placeholder_I + row - start)
        for images, start, end, row in rows
        for image, first, placeholder_I in images.iter_feature_runs(start, end)
    ]
    if not runs:
        return None
    return VisionBatch(
        token_I=np.concatenate([token_I for _, _, token_I in runs]),
        images=tuple(image for image, _, _ in runs),
        first_J=np.array([first for _, first, _ in runs], np.int64),
        count_J=np.array([len(token_I) for _, _, token_I in runs], np.int64),
    )
