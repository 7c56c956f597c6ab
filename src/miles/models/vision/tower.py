"""Vision tower: patches of images to features of the decoder's width, the same module in engine and trainer.

Shapes: P patches of all images, C values of a patch, D hidden of the tower, d its head_dim, F features, W hidden of the
decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.core.media import ImageInput
from miles.kernels.attention.bidirectional import Segments
from miles.kernels.fused.gemv import linear
from miles.kernels.numerics import Numerics
from miles.models.activation_checkpointing import CheckpointFn
from miles.models.layers.linear import Linear
from miles.models.vision.encoder import VisionBlock, activate, build_norm
from miles.models.vision.inputs import VisionFeatures
from miles.models.vision.patches import (
    PatchGrid,
    interpolate_positions,
    patch_positions,
    read_array,
    read_grid,
    window_order,
)
from miles.models.vision.spec import MergerSpec, VisionSpec, VisionTowerSpec

# Positions per cos/sin call: a fixed size gives the same bits with any number of threads.
_CHUNK = 64


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, as a matmul over patches."""

    def __init__(
        self, spec: VisionTowerSpec, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        super().__init__()
        self.numerics = numerics
        shape = (spec.hidden_size, *spec.patch_shape)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if spec.patch_bias:
            self.bias = nn.Parameter(torch.empty(spec.hidden_size, device=device, dtype=dtype))

    def forward(self, patches_PC: Tensor) -> Tensor:
        return linear(patches_PC.to(self.weight.dtype), self.weight.flatten(1), self.bias, numerics=self.numerics)


class PatchMerger(nn.Module):
    """Maps each square of patches to one feature."""

    def __init__(self, spec: MergerSpec, tower: VisionTowerSpec, merge_size: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.norm_merged = spec.norm_merged
        self.merged = tower.hidden_size * merge_size**2
        size = self.merged if spec.norm_merged else tower.hidden_size
        self.norm = build_norm(spec.norm, size, spec.norm_eps, **factory)
        self.up = Linear(self.merged, self.merged, bias=True, **factory)
        self.down = Linear(self.merged, width, bias=True, **factory)

    def forward(self, x_PD: Tensor) -> Tensor:
        x_PD = self.norm(x_PD.view(-1, self.merged)) if self.norm_merged else self.norm(x_PD)
        return self.down(activate(self.up(x_PD.view(-1, self.merged)), "gelu"))


class VisionTower(nn.Module):
    """Encodes images. Parameters are uninitialized, as those of the decoder.

    With batch-invariant numerics every image is encoded by itself: its features do not depend on the other images.
    """

    def __init__(
        self, spec: VisionSpec, width: int, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        super().__init__()
        self.spec = spec
        self.numerics = numerics
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        tower = spec.tower
        self.patch_embed = PatchEmbedding(tower, **factory)
        self.position_table: nn.Parameter | None = None
        if tower.position_side is not None:
            table = torch.empty(tower.position_side**2, tower.hidden_size, device=device, dtype=dtype)
            self.position_table = nn.Parameter(table)
        self.blocks = nn.ModuleList(VisionBlock(tower, **factory) for _ in range(tower.num_layers))
        self.merger = PatchMerger(tower.merger, tower, spec.merge_size, width, **factory)
        self.deepstack = nn.ModuleList()
        if tower.deepstack_merger is not None:
            self.deepstack.extend(
                PatchMerger(tower.deepstack_merger, tower, spec.merge_size, width, **factory)
                for _ in tower.deepstack_layers
            )

    def forward(self, images: Sequence[ImageInput], checkpoint_fn: CheckpointFn | None = None) -> VisionFeatures:
        """Compute the features of images, concatenated in their order; blocks run under ``checkpoint_fn`` if given."""
        if not images:
            raise ValueError("a vision tower was given no images to encode")
        if not self.numerics.batch_invariant:
            return self._encode(images, checkpoint_fn)
        with _one_thread(self.patch_embed.weight.device):
            parts = [self._encode([image], checkpoint_fn) for image in images]
        if len(parts) == 1:
            return parts[0]
        return VisionFeatures(
            embeds_FD=torch.cat([part.embeds_FD for part in parts]),
            deepstack=tuple(torch.cat(layer) for layer in zip(*(part.deepstack for part in parts), strict=True)),
        )

    def check(self, image: ImageInput) -> None:
        """Raise a ValueError if the arrays of an image are not what this tower encodes."""
        self._read_pixels(image, read_grid(image, self.spec.merge_size))

    def _encode(self, images: Sequence[ImageInput], checkpoint_fn: CheckpointFn | None) -> VisionFeatures:
        spec, tower, device = self.spec, self.spec.tower, self.patch_embed.weight.device
        grids = [read_grid(image, spec.merge_size) for image in images]
        x_PD = self.patch_embed(self._read_patches(images, grids, device))
        if self.position_table is not None:
            x_PD = x_PD + self._interpolate_table(self.position_table, grids).to(x_PD.dtype)
        cos_sin_P2d = None if tower.rope_theta is None else self._cos_sin(tower.rope_theta, grids, device)
        frames = Segments([grid.rows * grid.columns for grid in grids for _ in range(grid.frames)], device)
        windows, inverse_U = frames, None
        if tower.window is not None:
            order_U, lengths = self._window_order(tower.window, grids)
            windows, inverse_U = Segments(lengths, device), torch.from_numpy(order_U.argsort()).to(device)
            order = torch.from_numpy(order_U).to(device)
            x_PD = self._permute(x_PD, order)
            cos_sin_P2d = None if cos_sin_P2d is None else self._permute(cos_sin_P2d, order)
        deepstack: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            segments = frames if number in tower.full_layers else windows
            inputs = (x_PD, cos_sin_P2d, segments)
            x_PD = block(*inputs) if checkpoint_fn is None else checkpoint_fn(block, *inputs)
            if number in tower.deepstack_layers:
                deepstack.append(self.deepstack[tower.deepstack_layers.index(number)](x_PD))
        features = [self.merger(x_PD), *deepstack]
        if inverse_U is not None:
            features = [each.index_select(0, inverse_U) for each in features]
        return VisionFeatures(embeds_FD=features[0], deepstack=tuple(features[1:]))

    def _read_patches(self, images: Sequence[ImageInput], grids: Sequence[PatchGrid], device: torch.device) -> Tensor:
        pixels = (self._read_pixels(image, grid) for image, grid in zip(images, grids, strict=True))
        arrays = [_to_device(array, device) for array in pixels]
        return arrays[0] if len(arrays) == 1 else torch.cat(arrays)

    def _read_pixels(self, image: ImageInput, grid: PatchGrid) -> np.ndarray[Any, Any]:
        name = "pixel_values_videos" if image.kind == "video" else "pixel_values"
        array, size = read_array(image, name), int(np.prod(self.spec.tower.patch_shape))
        if array.shape != (grid.patches, size) or array.dtype.kind != "f":
            raise ValueError(
                f"{name} of an image is {array.dtype} of shape {array.shape}, but must be {grid.patches} patches of "
                f"{size} floats"
            )
        return array

    def _interpolate_table(self, table_ND: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        side, merge_size = self.spec.tower.position_side, self.spec.merge_size
        assert side is not None
        parts = [interpolate_positions(grid, merge_size, side) for grid in grids]
        index_P4, weight_P4 = (
            torch.from_numpy(np.concatenate(each)).to(table_ND.device) for each in zip(*parts, strict=True)
        )
        return (F.embedding(index_P4, table_ND) * weight_P4[..., None]).sum(1)

    def _cos_sin(self, theta: float, grids: Sequence[PatchGrid], device: torch.device) -> Tensor:
        at_P2 = np.concatenate([patch_positions(grid, self.spec.merge_size) for grid in grids])
        longest = 1 << int(at_P2.max()).bit_length()
        table_N2q = _axis_table(theta, self.spec.tower.head_dim // 4, longest, device)
        cos_sin_P22q = table_N2q.index_select(0, torch.from_numpy(at_P2.reshape(-1)).to(device))
        # Rows rotate the first quarter of the channels with the third, columns the second with the fourth.
        cos_P2q, sin_P2q = cos_sin_P22q.unflatten(0, (-1, 2)).unbind(2)
        cos_Ph, sin_Ph = cos_P2q.flatten(1), sin_P2q.flatten(1)
        return torch.stack((torch.cat((cos_Ph, cos_Ph), 1), torch.cat((-sin_Ph, sin_Ph), 1)), 1)

    def _window_order(self, window: int, grids: Sequence[PatchGrid]) -> tuple[np.ndarray[Any, Any], list[int]]:
        orders: list[np.ndarray[Any, Any]] = []
        lengths: list[int] = []
        start = 0
        for grid in grids:
            order_U, counts = window_order(grid, self.spec.merge_size, window)
            orders.append(order_U + start)
            lengths += counts
            start += len(order_U)
        return np.concatenate(orders), lengths

    def _permute(self, x: Tensor, order_U: Tensor) -> Tensor:
        """Reorder the squares of patches."""
        return x.unflatten(0, (-1, self.spec.merge_size**2)).index_select(0, order_U).flatten(0, 1)


@lru_cache(maxsize=16)
def _axis_table(theta: float, quarter: int, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of one axis' positions, float32 [N, 2, q]."""
    # Not an inference tensor, since a trainer in the same process saves it for backward.
    with torch.inference_mode(False), torch.no_grad():
        inv_q = 1.0 / theta ** (torch.arange(0, 2 * quarter, 2, dtype=torch.float32, device="cpu") / (2 * quarter))
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), inv_q).split(_CHUNK)
        return torch.cat([torch.stack((part.cos(), part.sin()), 1) for part in angles]).to(device)


def _to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy a read-only array to a device, without waiting for it."""
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    pinned = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
    pinned.numpy()[:] = array
    return pinned.to(device, non_blocking=True)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Run CPU kernels in one thread, since where they split a tensor may change the bits of its elements."""
    threads = torch.get_num_threads()
    alone = device.type == "cpu" and threads > 1
    if alone:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if alone:
            torch.set_num_threads(threads)
