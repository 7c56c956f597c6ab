"""Vision specs: a vision tower's architecture, and how its features enter the decoder. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PositionKind = Literal["sequential", "mrope"]
VisionNorm = Literal["layer", "rms"]
VisionActivation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionMlpSpec:
    """The MLP of a vision block; ``gated`` adds a gate projection."""

    size: int
    activation: VisionActivation
    gated: bool = False
    bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MergerSpec:
    """Patch merger: a norm, the patches of a square side by side, and an MLP with a GELU.

    ``norm_merged`` normalizes the patches of a square together instead of each by itself.
    """

    norm: VisionNorm
    norm_eps: float = 1e-6
    norm_merged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTowerSpec:
    """A vision transformer over patches of ``channels`` x ``temporal_patch_size`` x ``patch_size`` x ``patch_size``.

    Every frame attends to itself; with ``window`` (in merged patches, height and width), layers other than
    ``full_layers`` attend within windows. ``rope_theta`` rotates half of a head by a patch's row and half by its column
    (None: no RoPE). ``position_side`` is the height and width of a table of learned positions, interpolated to each
    image (None: no table). The outputs of ``deepstack_layers`` have mergers of their own.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    mlp: VisionMlpSpec
    norm: VisionNorm
    norm_eps: float
    patch_size: int
    merger: MergerSpec
    temporal_patch_size: int = 1
    channels: int = 3
    patch_bias: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    rope_theta: float | None = 10_000.0
    position_side: int | None = None
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    deepstack_layers: tuple[int, ...] = ()
    deepstack_merger: MergerSpec | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"{self.hidden_size} channels are not a multiple of {self.num_heads} heads")
        if self.rope_theta is not None and self.head_dim % 4:
            raise ValueError(f"RoPE in two dimensions needs a head of a multiple of 4 channels, not {self.head_dim}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Channels, frames, height and width of a patch."""
        return self.channels, self.temporal_patch_size, self.patch_size, self.patch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The vision part of a decoder.

    The features of images replace the embeddings of ``image_token_id``, those of videos ``video_token_id`` (None: the
    model takes no videos). ``positions`` ``mrope`` gives the tokens of an image positions in time, height and width
    (``vision.positions``), ``sequential`` counts them as text. ``merge_size`` patches in height and width become one
    feature. ``tokens_per_second`` is the distance in time between frames of a video that are a second apart (None:
    frames are at distance one).
    """

    image_token_id: int
    tower: VisionTowerSpec
    video_token_id: int | None = None
    positions: PositionKind = "sequential"
    merge_size: int = 1
    tokens_per_second: int | None = None
