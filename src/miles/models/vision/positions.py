"""Rope positions of sequences with images (multimodal RoPE: time, height, width), and bidirectional spans. No torch.

Text counts on, with three equal positions. The features of an image have their row and column in its grid of merged
patches, from the position that the next text token would have on; text after it continues behind the larger of its
height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.core.media import ImageInput, PlacedImage, find_placeholders
from miles.models.spec import DecoderSpec
from miles.models.vision.patches import PatchGrid, read_grid
from miles.models.vision.spec import VisionSpec

Array = NDArray[Any]
Ints = NDArray[np.int64]


def compute_rope_positions(spec: DecoderSpec, tokens: Array, images: Sequence[PlacedImage]) -> tuple[Ints, int]:
    """Compute the positions of a sequence, [3, T], and by how much those after the last image differ from its index.

    Token ``t`` after the last image has position ``t + delta`` on all three axes; ``delta`` is at most 0 for images.
    """
    vision = spec.vision
    if vision is None or vision.positions != "mrope":
        raise ValueError("only models with multimodal RoPE have positions in time, height and width")
    positions = np.empty((3, len(tokens)), np.int64)
    token, position = 0, 0
    for placed in images:
        at = find_placeholders(tokens, placed, get_placeholder(vision, placed.image))
        for run, grid in _split_runs(at, vision, placed.image):
            text = int(run[0]) - token
            positions[:, token : run[0]] = position + np.arange(text)
            position += text
            step = _frame_distance(vision, placed.image) if grid.frames > 1 else 1
            positions[:, run[0] : run[-1] + 1] = position + _grid_positions(grid, step)
            position += max(grid.rows, grid.columns)
            token = int(run[-1]) + 1
    positions[:, token:] = position + np.arange(len(tokens) - token)
    if len(tokens) and positions.max() >= spec.max_positions:
        raise ValueError(
            f"a token has position {positions.max()} in time, but the model has only {spec.max_positions} positions"
        )
    return positions, position - token


def compute_visible_ends(spec: DecoderSpec, tokens: Array, images: Sequence[PlacedImage]) -> Ints | None:
    """Compute one past the last token that each token of a sequence attends to, [T]; None if attention is causal.

    Causal attention ends with the token itself. In a model with bidirectional spans that of an image's placeholder ends
    with the run of placeholders it is in. ValueError if there is no token between two images, which such a model would
    take for one.
    """
    vision = spec.vision
    if vision is None or not vision.bidirectional_spans or not images:
        return None
    ends = np.arange(1, len(tokens) + 1)
    last = -1
    for number, placed in enumerate(images):
        at = find_placeholders(tokens, placed, get_placeholder(vision, placed.image))
        if at[0] == last + 1 and number:
            raise ValueError(
                f"image {number} begins right behind the one before it, but a {spec.family} model needs a token between"
            )
        last = int(at[-1])
        for run in np.split(at, np.flatnonzero(np.diff(at) != 1) + 1):
            ends[run] = run[-1] + 1
    return ends


def get_placeholder(vision: VisionSpec, image: ImageInput) -> int:
    """Return the token that the features of an image or video replace; ValueError if the model takes no videos."""
    if image.kind == "image":
        return vision.image_token_id
    if vision.video_token_id is None:
        raise ValueError("the model takes no videos; pass their frames as images")
    return vision.video_token_id


def _split_runs(at: Ints, vision: VisionSpec, image: ImageInput) -> list[tuple[Ints, PatchGrid]]:
    """The placeholders of an image: one run of its grid, or runs of one frame each, with text (timestamps) between."""
    grid = read_grid(image, vision)
    merged = PatchGrid(grid.frames, grid.rows // vision.merge_size, grid.columns // vision.merge_size)
    runs = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1)
    if len(runs) == 1:
        return [(at, merged)]
    frame = merged._replace(frames=1)
    if len(runs) != grid.frames or any(len(run) != frame.patches for run in runs):
        raise ValueError(
            f"the placeholders of a video are {len(runs)} runs of {[len(run) for run in runs]} tokens, but it has "
            f"{grid.frames} frames of {frame.patches} features"
        )
    return [(run, frame) for run in runs]


def _frame_distance(vision: VisionSpec, image: ImageInput) -> int:
    if vision.tokens_per_second is None or image.kind != "video":
        return 1
    seconds = image.arrays.get("second_per_grid_ts")
    return vision.tokens_per_second * int(1 if seconds is None else np.asarray(seconds).reshape(-1)[0])


def _grid_positions(grid: PatchGrid, step: int) -> Ints:
    """Time, row and column of every feature, [3, features]."""
    axes = np.meshgrid(np.arange(grid.frames) * step, np.arange(grid.rows), np.arange(grid.columns), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes])
