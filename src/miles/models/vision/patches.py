"""Patch grids of images: rows and columns of patches, attention windows, and interpolated position tables. No torch.

Patches are in the order of Qwen's processors: frame by frame, the squares of merged patches row by row, and the patches
within each square row by row.

Shapes: P patches, U = P / merge_size^2 squares, K = 4 neighbours in a position table.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles.core.media import ImageInput

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class PatchGrid(NamedTuple):
    """Patches of an image or video: frames, rows and columns."""

    frames: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.frames * self.rows * self.columns


def read_grid(image: ImageInput, merge_size: int) -> PatchGrid:
    """Return the grid of a processed image; ValueError if it does not fit the number of its features."""
    name = "video_grid_thw" if image.kind == "video" else "image_grid_thw"
    values = np.asarray(read_array(image, name)).reshape(-1)
    if len(values) != 3 or values.min() < 1:
        raise ValueError(f"{name} of an image is {values.tolist()}, but must be three positive integers")
    grid = PatchGrid(*(int(value) for value in values))
    if grid.rows % merge_size or grid.columns % merge_size:
        raise ValueError(
            f"an image has {grid.rows} x {grid.columns} patches, which is not a multiple of {merge_size} in both"
        )
    if grid.patches // merge_size**2 != image.num_features:
        raise ValueError(
            f"an image of {grid.frames} x {grid.rows} x {grid.columns} patches has {grid.patches // merge_size**2} "
            f"features, not {image.num_features}"
        )
    return grid


def read_array(image: ImageInput, name: str) -> NDArray[Any]:
    """Return an array of a processed image; ValueError if its processor made no such array."""
    if name not in image.arrays:
        found = ", ".join(image.arrays) or "none"
        raise ValueError(f"{name} is missing among the arrays of an image ({found}); use the checkpoint's processor")
    return image.arrays[name]


@lru_cache(maxsize=256)
def patch_positions(grid: PatchGrid, merge_size: int) -> Ints:
    """Row and column of every patch, [P, 2]."""
    rows, columns = np.meshgrid(np.arange(grid.rows), np.arange(grid.columns), indexing="ij")
    blocks = (grid.rows // merge_size, merge_size, grid.columns // merge_size, merge_size)
    frame = np.stack([x.reshape(blocks).swapaxes(1, 2).reshape(-1) for x in (rows, columns)], 1)
    return np.tile(frame, (grid.frames, 1))


@lru_cache(maxsize=256)
def window_order(grid: PatchGrid, merge_size: int, window: int) -> tuple[Ints, tuple[int, ...]]:
    """The squares of an image window by window, [U], and the patches of each window."""
    rows, columns = grid.rows // merge_size, grid.columns // merge_size
    index = np.arange(grid.frames * rows * columns).reshape(grid.frames, rows, columns)
    windows = [
        index[frame, top : top + window, left : left + window].reshape(-1)
        for frame in range(grid.frames)
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    return np.concatenate(windows), tuple(len(each) * merge_size**2 for each in windows)


@lru_cache(maxsize=256)
def interpolate_positions(grid: PatchGrid, merge_size: int, side: int) -> tuple[Ints, Floats]:
    """The four neighbours of every patch in a square table of positions, and their weights, [P, 4] each.

    The corners of the image are those of the table, and positions between are interpolated linearly.
    """
    at = patch_positions(grid, merge_size).astype(np.float32)
    most = np.maximum(np.array((grid.rows, grid.columns), np.float32) - 1, 1)
    source = at * np.float32(side - 1) / most
    low = np.floor(source)
    fraction = (source - low).astype(np.float32)
    near = low.astype(np.int64)
    taps = np.stack((near, np.minimum(near + 1, side - 1)), -1)  # [P, 2 axes, 2]
    weights = np.stack((1 - fraction, fraction), -1)
    index = taps[:, 0, :, None] * side + taps[:, 1, None, :]
    weight = weights[:, 0, :, None] * weights[:, 1, None, :]
    return index.reshape(-1, 4), weight.reshape(-1, 4).astype(np.float32)
