"""Patches of images: grids, rows and columns, attention windows, and interpolated position tables. No torch.

Patches are in the order of Qwen's processors: frame by frame (or tile by tile), the squares of merged patches row by
row, and the patches within each square row by row.

Shapes: P patches of C values, U = P / merge_size^2 squares, K neighbours in a position table.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles.core.media import ImageInput
from miles.models.vision.spec import PositionTableSpec, VisionSpec

Array = NDArray[Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# The kernel of bicubic interpolation that torch and most image libraries use.
_CUBIC = -0.75


class PatchGrid(NamedTuple):
    """Patches of an image or video: frames (or tiles), rows and columns."""

    frames: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.frames * self.rows * self.columns


def read_grid(image: ImageInput, spec: VisionSpec) -> PatchGrid:
    """Return the grid of a processed image; ValueError if it does not fit the number of its features."""
    match spec.tower.pixels:
        case "tiles":
            grid = _read_tile_grid(image, spec.tower.patch_size)
        case "padded":
            grid = _read_padded_grid(image)
        case _:
            grid = _read_patch_grid(image)
    merge_size = spec.merge_size
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


def _read_patch_grid(image: ImageInput) -> PatchGrid:
    name = "video_grid_thw" if image.kind == "video" else "image_grid_thw"
    values = np.asarray(read_array(image, name)).reshape(-1)
    if len(values) != 3 or values.min() < 1:
        raise ValueError(f"{name} of an image is {values.tolist()}, but must be three positive integers")
    return PatchGrid(*(int(value) for value in values))


def _read_padded_grid(image: ImageInput) -> PatchGrid:
    """The grid of patches whose columns and rows are given, with (-1, -1) for padding behind those of each frame."""
    is_video = image.kind == "video"
    name = "video_position_ids" if is_video else "image_position_ids"
    given = np.asarray(read_array(image, name))
    at_FP2 = given.reshape(given.shape[-3] if is_video and given.ndim > 2 else 1, -1, 2)
    frames, longest, _ = at_FP2.shape
    columns, rows = (int(most) + 1 for most in at_FP2.max((0, 1), initial=-1))
    if min(columns, rows) < 1 or rows * columns > longest:
        raise ValueError(f"{name} of an image are those of {rows} rows and {columns} columns of patches")
    number = np.arange(rows * columns)
    expected = np.stack((number % columns, number // columns), 1)
    if (at_FP2[:, : rows * columns] != expected).any() or (at_FP2[:, rows * columns :] != -1).any():
        raise ValueError(f"{name} of an image are not its patches row by row, with padding behind them")
    return PatchGrid(frames, rows, columns)


def _read_tile_grid(image: ImageInput, patch_size: int) -> PatchGrid:
    tiles = _read_tiles(image)
    return PatchGrid(len(tiles), tiles.shape[2] // patch_size, tiles.shape[3] // patch_size)


def _read_tiles(image: ImageInput) -> Array:
    """Return the tiles of an image, [tiles, channels, height, width], without padding at their right and bottom."""
    pixels = read_array(image, "pixel_values")
    if pixels.ndim < 3:
        raise ValueError(f"pixel_values of an image has shape {pixels.shape}, but must have channels, height and width")
    tiles = pixels.reshape(-1, *pixels.shape[-3:])
    mask = image.arrays.get("pixel_attention_mask")
    if mask is not None and not mask.all():
        raise ValueError("an image has padding inside a tile; let the processor resize images to the size of a tile")
    sizes = image.arrays.get("image_sizes")
    if sizes is None:
        return tiles
    height, width = (int(size) for size in np.asarray(sizes).reshape(-1)[:2])
    return tiles[:, :, :height, :width]


def read_patches(image: ImageInput, grid: PatchGrid, spec: VisionSpec) -> Array:
    """Return the patches of an image, [P, C]."""
    tower, merge_size = spec.tower, spec.merge_size
    size, channels = tower.patch_size, tower.channels
    if tower.pixels != "tiles":
        name = "pixel_values_videos" if image.kind == "video" else "pixel_values"
        array = read_array(image, name)
        if tower.pixels == "padded":
            frames = array.reshape(grid.frames, -1, array.shape[-1])[:, : grid.rows * grid.columns]
            array = 2 * (frames - 0.5)  # from 0 to 1, which the model expects from -1 to 1
            array = array.reshape(-1, array.shape[-1])
        else:
            array = array.reshape(len(array), -1)
        if array.shape != (grid.patches, tower.patch_values):
            raise ValueError(
                f"{name} of an image has shape {array.shape}, but {grid.patches} patches of {tower.patch_values} "
                "values are needed"
            )
        if tower.pixels == "patches":
            return array
        rows, columns = patch_positions(grid, merge_size)[: grid.rows * grid.columns].T
        return array.reshape(grid.frames, grid.rows * grid.columns, -1)[:, rows * grid.columns + columns].reshape(
            array.shape
        )
    tiles = _read_tiles(image)
    if tiles.shape[1] != channels:
        raise ValueError(f"pixel_values of an image has {tiles.shape[1]} channels, but the model takes {channels}")
    rows, columns = grid.rows // merge_size, grid.columns // merge_size
    tiles = tiles[:, :, : grid.rows * size, : grid.columns * size]
    blocks = tiles.reshape(grid.frames, channels, rows, merge_size, size, columns, merge_size, size)
    return blocks.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(grid.patches, -1)


def read_array(image: ImageInput, name: str) -> Array:
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
def interpolate_positions(grid: PatchGrid, merge_size: int, table: PositionTableSpec) -> tuple[Ints, Floats]:
    """The neighbours of every patch in a table of positions, and their weights, [P, K] each."""
    at = patch_positions(grid, merge_size)
    side = table.side
    if table.kind == "axes":
        if max(grid.rows, grid.columns) > side:
            raise ValueError(f"an image has {grid.rows} x {grid.columns} patches, but the model has {side} positions")
        return np.stack((at[:, 1], side + at[:, 0]), 1), np.ones((len(at), 2), np.float32)
    if table.kind == "fixed":
        if (grid.rows, grid.columns) != (side, side):
            raise ValueError(
                f"an image has {grid.rows} x {grid.columns} patches, but the model takes {side} x {side} only"
            )
        return at[:, :1] * side + at[:, 1:], np.ones((len(at), 1), np.float32)
    sizes = np.array((grid.rows, grid.columns), np.float32)
    if table.kind == "bilinear":
        source = at.astype(np.float32) * np.float32(side - 1) / np.maximum(sizes - 1, 1)
        offsets = np.arange(2)
    else:
        source = (at.astype(np.float32) + np.float32(0.5)) / sizes * side - np.float32(0.5)
        offsets = np.arange(-1, 3)
    low = np.floor(source)
    taps = np.clip(low.astype(np.int64)[..., None] + offsets, 0, side - 1)  # [P, 2 axes, taps]
    distance = np.abs((source - low)[..., None] - offsets).astype(np.float32)
    weights = np.maximum(1 - distance, 0) if table.kind == "bilinear" else _cubic(distance)
    index = taps[:, 0, :, None] * side + taps[:, 1, None, :]
    weight = weights[:, 0, :, None] * weights[:, 1, None, :]
    return index.reshape(len(at), -1), weight.reshape(len(at), -1).astype(np.float32)


def _cubic(distance: Floats) -> Floats:
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * _CUBIC - 4 * _CUBIC
    return np.where(distance <= 1, near, far)
