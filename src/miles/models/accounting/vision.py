"""FLOPs and activation memory of a vision tower, from the spec. No torch.

A feature of an image is computed from ``merge_size`` x ``merge_size`` patches: blocks run once per patch, projectors
once per feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from types import MappingProxyType

from miles.models.checkpoint.param_map import build_param_map, param_shape
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.optim_groups import is_projector_param, is_vision_param
from miles.models.spec import DecoderSpec

# Values that a vision block saves per patch and hidden channel: the inputs and outputs of two norms, queries, keys and
# values, and the output of attention; without fused norms also their normalized values.
_SAVED = 8
_SAVED_UNFUSED = 10


@lru_cache(maxsize=32)
def vision_param_shapes(spec: DecoderSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the parameters of the vision tower and its projectors, by name; empty if it has none."""
    if spec.vision is None or isinstance(spec, HfAdapterSpec):
        return MappingProxyType({})
    params = build_param_map(spec).items()
    return MappingProxyType({name: tuple(param_shape(slices)) for name, slices in params if is_vision_param(name)})


def vision_flops_per_feature(spec: DecoderSpec) -> float:
    """Compute the matmul FLOPs of one feature (a multiply-add is two); attention among patches is not counted."""
    if spec.vision is None:
        return 0.0
    shapes = vision_param_shapes(spec)
    # A table of positions is looked up.
    matrices = {name: prod(shapes[name]) for name in shapes if len(shapes[name]) > 1 and not name.endswith("table")}
    projected = sum(size for name, size in matrices.items() if is_projector_param(name))
    encoded = sum(matrices.values()) - projected
    return 2.0 * (encoded * spec.vision.merge_size**2 + projected)


def vision_activation_bytes(spec: DecoderSpec, patches: int, *, size: int, fused: bool, recomputed: bool) -> int:
    """Compute what a trained vision tower saves of ``patches`` for backward; ``size`` is the bytes of a value.

    With ``recomputed`` blocks each saves its input only, and one block at a time is recomputed.
    """
    if spec.vision is None:
        return 0
    tower, merge = spec.vision.tower, spec.vision.merge_size**2
    hidden = tower.hidden_size
    block = hidden * (_SAVED if fused else _SAVED_UNFUSED) + tower.mlp.size * (4 if tower.mlp.gated else 2)
    blocks = tower.num_layers * (hidden if recomputed else block) + block
    # A projector saves its normalized input and the input and output of its activation.
    projectors = (1 + len(tower.deepstack_layers)) * 3 * hidden
    features = (1 + len(tower.deepstack_layers)) * spec.hidden_size
    return round(size * (patches * (prod(tower.patch_shape) + blocks + projectors) + patches / merge * features))
