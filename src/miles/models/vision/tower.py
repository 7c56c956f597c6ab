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
from miles.models.layers.norm import LayerNorm, RMSNorm
from miles.models.vision.encoder import VisionBlock, build_norm
from miles.models.vision.inputs import VisionFeatures
from miles.models.vision.patches import (
    PatchGrid,
    interpolate_positions,
    patch_positions,
    read_grid,
    read_patches,
    window_order,
)
from miles.models.vision.projectors import build_projector
from miles.models.vision.spec import VisionSpec, VisionTowerSpec

# Positions per cos/sin call: a fixed size gives the same bits with any number of threads.
_CHUNK = 64


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, as a matmul over patches."""

    def __init__(
        self, spec: VisionTowerSpec, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        super().__init__()
        self.numerics = numerics
        shape = (spec.patch_values,) if spec.patch_linear else spec.patch_shape
        shape = (spec.hidden_size, *shape)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if spec.patch_bias:
            self.bias = nn.Parameter(torch.empty(spec.hidden_size, device=device, dtype=dtype))

    def forward(self, patches_PC: Tensor) -> Tensor:
        return linear(patches_PC.to(self.weight.dtype), self.weight.flatten(1), self.bias, numerics=self.numerics)


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
        table = tower.position_table_shape
        self.position_table = None if table is None else self._parameter(*table, **factory)
        self.class_token: nn.Parameter | None = None
        if tower.class_token is not None:
            self.class_token = self._parameter(*tower.class_token_shape, **factory)
        self.pre_norm = self._norm(tower.pre_norm, **factory)
        self.blocks = nn.ModuleList(VisionBlock(tower, **factory) for _ in range(tower.num_layers))
        self.post_norm = self._norm(tower.post_norm, **factory)
        self.merger = build_projector(tower.projector, tower.hidden_size, spec.merge_size, width, **factory)
        self.deepstack = nn.ModuleList()
        if tower.deepstack_projector is not None:
            self.deepstack.extend(
                build_projector(tower.deepstack_projector, tower.hidden_size, spec.merge_size, width, **factory)
                for _ in tower.deepstack_layers
            )

    def _norm(self, present: bool, **factory: Any) -> LayerNorm | RMSNorm | None:
        tower = self.spec.tower
        return build_norm(tower.norm, tower.hidden_size, tower.norm_eps, **factory) if present else None

    @staticmethod
    def _parameter(*shape: int, device: torch.device | str, dtype: torch.dtype, numerics: Numerics) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

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
        grid = read_grid(image, self.spec)
        patches = read_patches(image, grid, self.spec)
        if patches.dtype.kind != "f":
            raise ValueError(f"the pixels of an image are {patches.dtype}, but must be floats")
        if self.spec.tower.positions is not None:
            interpolate_positions(grid, self.spec.merge_size, self.spec.tower.positions)

    def _encode(self, images: Sequence[ImageInput], checkpoint_fn: CheckpointFn | None) -> VisionFeatures:
        tower, device = self.spec.tower, self.patch_embed.weight.device
        grids = [read_grid(image, self.spec) for image in images]
        dtype = self.patch_embed.weight.dtype
        pairs = zip(images, grids, strict=True)
        patches = [_to_device(read_patches(*pair, self.spec), device, dtype) for pair in pairs]
        x_PD = self._embed(patches[0] if len(patches) == 1 else torch.cat(patches), grids)
        cos_sin_P2d = None if tower.rope_theta is None else self._cos_sin(tower.rope_theta, grids, device)
        extra = tower.class_token is not None
        frames = Segments([grid.rows * grid.columns + extra for grid in grids for _ in range(grid.frames)], device)
        windows, inverse_U = frames, None
        if tower.window is not None:
            order_U, lengths = self._window_order(tower.window, grids)
            windows, inverse_U = Segments(lengths, device), torch.from_numpy(order_U.argsort()).to(device)
            order = torch.from_numpy(order_U).to(device)
            x_PD = self._permute(x_PD, order)
            cos_sin_P2d = None if cos_sin_P2d is None else self._permute(cos_sin_P2d, order)
        features: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            segments = frames if number in tower.full_layers else windows
            inputs = (x_PD, cos_sin_P2d, segments)
            x_PD = block(*inputs) if checkpoint_fn is None else checkpoint_fn(block, *inputs)
            if number in tower.deepstack_layers:
                projector = self.deepstack[tower.deepstack_layers.index(number)]
                features.append(projector(self._squares(x_PD, grids)))
        x_PD = x_PD if self.post_norm is None else self.post_norm(x_PD)
        features.insert(0, self.merger(self._squares(x_PD, grids)))
        if inverse_U is not None:
            features = [each.index_select(0, inverse_U) for each in features]
        return VisionFeatures(embeds_FD=features[0], deepstack=tuple(features[1:]))

    def _embed(self, patches_PC: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        """Embed patches, with their learned positions and class tokens, if there are any."""
        tower = self.spec.tower
        x_PD = self.patch_embed(patches_PC)
        if self.pre_norm is not None and tower.norm_first:
            x_PD = self.pre_norm(x_PD)
        table_ND = None if self.position_table is None else self.position_table.flatten(0, -2)
        if table_ND is not None:
            first = 1 if tower.class_token == "first" else 0
            x_PD = x_PD + self._interpolate_table(table_ND[first:], grids).to(x_PD.dtype)
        if self.class_token is not None:
            token_D = self.class_token.flatten()
            if table_ND is not None:
                token_D = token_D + table_ND[0 if tower.class_token == "first" else -1]
            x_PD = self._insert_class_tokens(token_D, x_PD, grids)
        if self.pre_norm is not None and not tower.norm_first:
            x_PD = self.pre_norm(x_PD)
        return x_PD

    def _insert_class_tokens(self, token_D: Tensor, x_PD: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        first = self.spec.tower.class_token == "first"
        tiles = [tile for grid, part in self._split(x_PD, grids, 0) for tile in part.unflatten(0, (grid.frames, -1))]
        pieces = [(token_D[None], tile) if first else (tile, token_D[None]) for tile in tiles]
        return torch.cat([piece for pair in pieces for piece in pair])

    def _squares(self, x_PD: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        """The patches of every square, [F, S, D], without class tokens."""
        side = self.spec.tower.class_token
        if side is not None:
            rows = slice(1, None) if side == "first" else slice(None, -1)
            parts = self._split(x_PD, grids, 1)
            x_PD = torch.cat([part.unflatten(0, (grid.frames, -1))[:, rows].flatten(0, 1) for grid, part in parts])
        return x_PD.unflatten(0, (-1, self.spec.merge_size**2))

    @staticmethod
    def _split(x: Tensor, grids: Sequence[PatchGrid], extra: int) -> Iterator[tuple[PatchGrid, Tensor]]:
        """The rows of each image, whose tiles have ``extra`` rows beyond their patches."""
        return zip(grids, x.split([grid.frames * (grid.rows * grid.columns + extra) for grid in grids]), strict=True)

    def _interpolate_table(self, table_ND: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        assert self.spec.tower.positions is not None
        parts = [interpolate_positions(grid, self.spec.merge_size, self.spec.tower.positions) for grid in grids]
        index_PK, weight_PK = (
            torch.from_numpy(np.concatenate(each)).to(table_ND.device) for each in zip(*parts, strict=True)
        )
        return (F.embedding(index_PK, table_ND) * weight_PK[..., None]).sum(1)

    def _cos_sin(self, theta: float, grids: Sequence[PatchGrid], device: torch.device) -> Tensor:
        """Cosines and signed sines of every patch, and of class tokens, which are not rotated, [P, 2, d]."""
        tower = self.spec.tower
        parts: list[np.ndarray[Any, Any]] = []
        for grid in grids:
            at_P2 = patch_positions(grid, self.spec.merge_size) + (1 if tower.rope == "complex" else 0)
            if tower.class_token is not None:
                pads = (1, 0) if tower.class_token == "first" else (0, 1)
                at_P2 = np.pad(at_P2.reshape(grid.frames, -1, 2), ((0, 0), pads, (0, 0))).reshape(-1, 2)
            parts.append(at_P2)
        at_P2 = np.concatenate(parts)
        longest = 1 << int(at_P2.max()).bit_length()
        table_N22q = _axis_table(theta, tower.head_dim // 4, tower.rope, longest, device)
        rows_P2q, columns_P2q = (
            table_N22q[:, axis].index_select(0, torch.from_numpy(at_P2[:, axis].copy()).to(device)) for axis in (0, 1)
        )
        if tower.rope in ("complex", "pairs"):  # neighbouring channels in pairs, columns before rows
            axes = (columns_P2q, rows_P2q)
            both_P2h = torch.cat(axes, 2) if tower.rope == "complex" else torch.stack(axes, 3).flatten(2)
            cos_Ph, sin_Ph = both_P2h.unbind(1)
            sines_Pd = torch.stack((-sin_Ph, sin_Ph), -1).flatten(1)
            return torch.stack((cos_Ph.repeat_interleave(2, 1), sines_Pd), 1)
        axes = (columns_P2q, rows_P2q) if tower.rope == "halves" else (rows_P2q, columns_P2q)
        cos_Ph, sin_Ph = torch.cat(axes, 2).unbind(1)
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
def _axis_table(theta: float, quarter: int, kind: str, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of positions in rows and in columns, float32 [N, 2 axes, 2, q]."""
    # Not an inference tensor, since a trainer in the same process saves it for backward.
    with torch.inference_mode(False), torch.no_grad():
        exponents_q = torch.arange(0, 2 * quarter, 2, dtype=torch.float32, device="cpu") / (2 * quarter)
        shift = 1.0 / (2 * quarter) if kind == "alternating" else 0.0
        inv_2q = 1.0 / theta ** torch.stack((exponents_q, exponents_q + shift))
        at_N = torch.arange(length, dtype=torch.float32, device="cpu")
        angles = (at_N[:, None, None] * inv_2q).split(_CHUNK)
        return torch.cat([torch.stack((part.cos(), part.sin()), 2) for part in angles]).to(device)


def _to_device(array: np.ndarray[Any, Any], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy a read-only array to a device, without waiting for it.

    For a GPU it is rounded to ``dtype`` on the host, by several threads: half the bytes are copied.
    """
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    pinned.copy_(torch.from_numpy(np.asarray(_WritableView(array))))
    return pinned.to(device, non_blocking=True)


class _WritableView:
    """An array as numpy's array interface describes it, but writable: torch warns of others, even if it only reads."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array  # keeps the memory
        self.__array_interface__ = array.__array_interface__ | {"data": (array.__array_interface__["data"][0], False)}


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
