"""Memory of images in an engine: bytes of a feature, and of the vision tower's activations. No torch."""

from __future__ import annotations

from miles.models.accounting.params import BYTES
from miles.models.spec import DecoderSpec

# The most patches of images that the vision tower encodes at once, if one image has no more: they keep a GPU busy.
MAX_ENCODED_PATCHES = 1 << 15


def feature_bytes(spec: DecoderSpec, dtype: str) -> int:
    """Return the bytes of one feature: its embedding, and one more vector for each deepstack layer."""
    assert spec.vision is not None
    return spec.hidden_size * (1 + len(spec.vision.tower.deepstack_layers)) * BYTES[dtype]


def tower_activation_bytes(spec: DecoderSpec, dtype: str) -> int:
    """Return the most that the tower's activations take while it encodes ``MAX_ENCODED_PATCHES``.

    Per patch: its pixels in float32, the residual stream and its norm, and queries, keys, values and attention output
    or the inner activations of the MLP.
    """
    assert spec.vision is not None
    tower = spec.vision.tower
    inner = max(4 * tower.hidden_size, (3 if tower.mlp.gated else 2) * tower.mlp.size)
    return MAX_ENCODED_PATCHES * (tower.patch_values * 4 + (2 * tower.hidden_size + inner) * BYTES[dtype])


def vision_bytes(spec: DecoderSpec, dtype: str, cache_bytes: int) -> int:
    """Return what an engine needs for images beside the weights: cached features and activations; 0 without a tower."""
    return 0 if spec.vision is None else cache_bytes + tower_activation_bytes(spec, dtype)
