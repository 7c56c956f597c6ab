"""Vision tower on the first pipeline stage: image features in place of placeholder tokens, and deepstack features.

Every tensor-parallel rank has the tower; under sequence and context parallelism it encodes the images of its tokens.
Shapes: ``t`` slots of this rank, 1 Megatron's batch dimension, I placeholder tokens, D features.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles.backends.megatron.packed_batch import PackedParams
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.models.activation_checkpointing import checkpoint_full
from miles.models.vision.tower import VisionTower


def build_vision_tower(config: DecoderTransformerConfig) -> VisionTower:
    """Build the tower of the decoder, uninitialized."""
    vision = config.decoder_spec.vision
    assert vision is not None
    factory: dict[str, Any] = {"device": config.param_device, "dtype": config.params_dtype}
    return VisionTower(vision, config.hidden_size, **factory, numerics=config.numerics)


def place_images(tower: VisionTower, x_t1D: Tensor, packed: PackedParams, config: DecoderTransformerConfig) -> Tensor:
    """Return embeddings in which features replace placeholders; ``packed`` gets the features of the first layers."""
    vision = packed.vision
    if vision is None or not vision.images:
        return x_t1D
    again = config.recompute_granularity == "full" and torch.is_grad_enabled()
    features = tower(vision.images, checkpoint_full if again else None).select(vision.feature_I)
    x_tD = x_t1D.squeeze(1)
    x_tD = x_tD.index_copy(0, vision.token_I, features.embeds_FD.to(x_tD.dtype))
    packed.deepstack = tuple(each.detach().requires_grad_(each.requires_grad) for each in features.deepstack)
    if any(each.requires_grad for each in packed.deepstack):
        x_tD = _PassGrads.apply(x_tD, packed.deepstack, *features.deepstack)
        assert isinstance(x_tD, Tensor)
    return x_tD.unsqueeze(1)


class _PassGrads(torch.autograd.Function):
    """The identity, whose backward gives ``features`` the gradients that layers left in ``leaves``.

    Layers may be recomputed in backward, one after the other, and the tower's backward runs once.
    """

    @staticmethod
    def forward(ctx: Any, x_tD: Tensor, leaves: Sequence[Tensor], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return x_tD.view_as(x_tD)

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_tD, None, *(leaf.grad for leaf in ctx.leaves)


def add_deepstack(x_t1D: Tensor, packed: PackedParams, layer: int) -> Tensor:
    """Add the features of ``layer`` to the hidden states behind it, if it has any."""
    if layer in packed.sent_deepstack_sD:
        return x_t1D + packed.sent_deepstack_sD[layer].unsqueeze(1)
    if packed.vision is None or layer >= len(packed.deepstack):
        return x_t1D
    token_I = packed.vision.token_I
    rows_I1D = packed.deepstack[layer].to(x_t1D.dtype).unsqueeze(1)
    # No view: the output of a stage is freed when it has been sent.
    return x_t1D.index_copy(0, token_I, x_t1D.index_select(0, token_I) + rows_I1D)


def spread_deepstack(packed: PackedParams, layer: int, like_s1D: Tensor) -> Tensor:
    """Return what ``layer`` adds to each slot, [s, D]: zeros for tokens without features."""
    if layer in packed.sent_deepstack_sD:
        return packed.sent_deepstack_sD[layer]
    zeros_sD = torch.zeros_like(like_s1D.squeeze(1))
    if packed.vision is None or layer >= len(packed.deepstack):
        return zeros_sD
    return zeros_sD.index_copy(0, packed.vision.token_I, packed.deepstack[layer].to(zeros_sD.dtype))
