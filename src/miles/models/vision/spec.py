"""Vision specs: a vision tower's architecture, and how its features enter the decoder. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PositionKind = Literal["sequential", "mrope"]
VisionNorm = Literal["layer", "rms"]
VisionActivation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu"]


CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""The bounds of a clipped projection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionMlpSpec:
    """The MLP of a vision block; ``gated`` adds a gate projection."""

    size: int
    activation: VisionActivation
    gated: bool = False
    bias: bool = True


# -- projectors: from the patches of a square to one feature -----------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MergerSpec:
    """Qwen's patch merger: a norm, the patches of a square side by side, and an MLP with a GELU.

    ``norm_merged`` normalizes the patches of a square together instead of each by itself.
    """

    norm: VisionNorm
    norm_eps: float = 1e-6
    norm_merged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvMergerSpec:
    """GLM's patch merger: a convolution over a square, a projection, LayerNorm and GELU, and a gated MLP."""

    size: int
    activation: VisionActivation
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpProjectorSpec:
    """Two linear layers with an activation between; before them RMSNorm and a linear layer that merges a square.

    ``norm_eps`` None is without norm; squares of one patch are not merged.
    """

    activation: VisionActivation
    bias: bool
    norm_eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleProjectorSpec:
    """Pixel shuffle: the patches of a square side by side, then linear layers.

    ``kind`` ``linear`` is one linear layer without bias; ``mlp`` LayerNorm and two linear layers with a GELU between;
    ``adapter`` two linear layers without bias, a GELU after each, of ``inner`` and ``outer`` channels, and a linear
    layer without bias. ``by_column`` lists the patches of a square column by column.
    """

    kind: Literal["linear", "mlp", "adapter"]
    norm_eps: float = 1e-5
    inner: int = 0
    outer: int = 0
    by_column: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProjectorSpec:
    """Average pooling over the patches of a square, RMSNorm (of weights plus ``norm_offset``) and a linear layer."""

    norm_eps: float = 1e-6
    norm_offset: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPoolProjectorSpec:
    """Average pooling over the patches of a square times the root of the tower's width, RMSNorm without weights, and a
    linear layer.

    ``standardize`` subtracts a bias of the checkpoint behind the pooling and multiplies by a scale; neither is trained.
    """

    norm_eps: float = 1e-6
    standardize: bool = False


ProjectorSpec = (
    MergerSpec | ConvMergerSpec | MlpProjectorSpec | ShuffleProjectorSpec | PoolProjectorSpec | ScaledPoolProjectorSpec
)


# -- the tower -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTableSpec:
    """A table of ``side`` x ``side`` learned positions of patches, added to their embeddings.

    ``axes`` has ``side`` positions of columns and as many of rows instead, of which a patch is given one each.
    ``bilinear`` interpolates it with the corners of the image at those of the table, ``bicubic`` with the edges of the
    image at those of the table; ``fixed`` takes images of the table's size only. In the checkpoint a ``batched`` table
    and class token have leading dimensions of one, and a ``square`` table is not flattened.
    """

    side: int
    kind: Literal["bilinear", "bicubic", "fixed", "axes"]
    layout: Literal["flat", "batched", "square"] = "flat"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTowerSpec:
    """A vision transformer over patches of ``channels`` x ``temporal_patch_size`` x ``patch_size`` x ``patch_size``.

    ``pixels`` is how the checkpoint's processor returns an image: ``patches`` in squares, or ``rows`` of patches, with
    the grid of an image, or ``tiles`` of pixels, or ``padded`` rows of patches from 0 to 1, with the column and row of
    each. Every frame or tile attends to itself; with ``window`` (in squares of
    merged patches, height and width), layers other than ``full_layers`` attend within windows. A ``class_token`` is
    before or after the patches of a tile, and has no feature.

    ``rope_theta`` rotates half of a head by a patch's row and half by its column (None: no RoPE), with the same
    frequencies. ``rope`` ``alternating`` takes every other frequency for rows and those between for columns;
    ``complex`` rotates neighbouring channels, by columns in the first half of a head, and counts from one; ``pairs``
    rotates neighbouring channels by columns and rows in turns; ``halves`` rotates the first half of a head by columns
    and the second by rows, each with the channels of its own halves in pairs.

    ``pre_norm`` is a norm before the first block, ``post_norm`` after the last; with ``norm_first`` positions of the
    table are added after the former; ``block_post_norms`` also normalize the output of attention and MLP. ``qk_norm``
    normalizes the queries and keys of each head, and values without weights; scores are then not scaled.
    ``scaled_qk_norm`` normalizes queries and keys only, and scores are scaled.
    ``layer_scale`` scales the output of attention and MLP by learned factors. ``clipped`` blocks clamp the input and
    the output of each projection to ranges of the checkpoint. The outputs of ``deepstack_layers`` have projectors of
    their own. ``patch_linear``: the checkpoint has a matrix in place of the convolution that embeds patches.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    mlp: VisionMlpSpec
    norm: VisionNorm
    norm_eps: float
    patch_size: int
    projector: ProjectorSpec
    pixels: Literal["patches", "rows", "tiles", "padded"] = "patches"
    temporal_patch_size: int | None = None
    channels: int = 3
    patch_bias: bool = False
    patch_linear: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    rope_theta: float | None = 10_000.0
    rope: Literal["axial", "alternating", "complex", "pairs", "halves"] = "axial"
    positions: PositionTableSpec | None = None
    class_token: Literal["first", "last"] | None = None
    pre_norm: bool = False
    post_norm: bool = False
    norm_first: bool = False
    layer_scale: bool = False
    clipped: bool = False
    qk_norm: bool = False
    scaled_qk_norm: bool = False
    block_post_norms: bool = False
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    deepstack_layers: tuple[int, ...] = ()
    deepstack_projector: MergerSpec | None = None

    def __post_init__(self) -> None:
        if self.qk_norm and self.scaled_qk_norm:
            raise ValueError("a tower has one kind of QK-norm")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"{self.hidden_size} channels are not a multiple of {self.num_heads} heads")
        if self.rope_theta is not None and self.head_dim % 4:
            raise ValueError(f"RoPE in two dimensions needs a head of a multiple of 4 channels, not {self.head_dim}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Channels, frames (if a patch has several), height and width of a patch, as in the checkpoint."""
        frames = () if self.temporal_patch_size is None else (self.temporal_patch_size,)
        return self.channels, *frames, self.patch_size, self.patch_size

    @property
    def position_table_shape(self) -> tuple[int, ...] | None:
        """Shape of the table of positions; a class token has a row of its own, before or after those of patches."""
        if self.positions is None:
            return None
        side, layout = self.positions.side, self.positions.layout
        if self.positions.kind == "axes":
            return 2, side, self.hidden_size
        if layout == "square":
            return side, side, self.hidden_size
        rows = side**2 + (self.class_token is not None)
        return (1, rows, self.hidden_size) if layout == "batched" else (rows, self.hidden_size)

    @property
    def class_token_shape(self) -> tuple[int, ...]:
        """Shape of the class token."""
        batched = self.positions is not None and self.positions.layout == "batched"
        return (1, 1, self.hidden_size) if batched else (self.hidden_size,)

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return self.channels * (self.temporal_patch_size or 1) * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The vision part of a decoder.

    The features of images replace the embeddings of ``image_token_id``, those of videos ``video_token_id`` (None: the
    model takes no videos). ``positions`` ``mrope`` gives the tokens of an image positions in time, height and width
    (``vision.positions``), ``sequential`` counts them as text. ``merge_size`` patches in height and width become one
    feature. ``tokens_per_second`` is the distance in time between frames of a video that are a second apart (None:
    frames are at distance one). With ``bidirectional_spans`` every run of an image's placeholders attends to itself in
    both directions, and to earlier tokens; sliding windows still hide tokens before them.
    """

    image_token_id: int
    tower: VisionTowerSpec
    video_token_id: int | None = None
    positions: PositionKind = "sequential"
    merge_size: int = 1
    tokens_per_second: int | None = None
    bidirectional_spans: bool = False
