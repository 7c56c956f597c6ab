"""What a vision tower keeps for backward and computes, against torch."""

import pytest
import torch
from tests.models.vision.small_vision import vision_model, vision_twin
from tests.train.vision_samples import image
from torch.utils.flop_counter import FlopCounterMode

from miles.models.accounting.params import forward_flops_per_token
from miles.models.accounting.vision import vision_activation_bytes, vision_flops_per_feature
from miles.models.activation_checkpointing import checkpoint_full
from miles.train.balance import build_flops_cost, build_token_cost

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PICTURE = image(0, 24, 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_bytes_kept_for_backward_are_about_those_counted(kind: str, recomputed: bool) -> None:
    decoder = vision_twin(vision_model(kind))
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    assert decoder.vision is not None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = decoder.vision([PICTURE], checkpoint_full if recomputed else None)
    assert len(features.embeds_FD) == PICTURE.num_features
    patches = len(PICTURE.arrays["pixel_values"])
    counted = vision_activation_bytes(decoder.spec, patches, size=4, fused=False, recomputed=recomputed)
    # Besides what is saved, the count has one more block, as that of the decoder has one more layer.
    tower = decoder.spec.vision.tower
    block = 4 * patches * (10 * tower.hidden_size + tower.mlp.size * (4 if tower.mlp.gated else 2))
    found = sum(kept.values())
    assert 0.6 * found < counted - block < 1.4 * found


@pytest.mark.parametrize("kind", KINDS)
def test_the_flops_of_a_feature_are_those_that_torch_counts_in_matmuls(kind: str) -> None:
    decoder = vision_twin(vision_model(kind))
    assert decoder.vision is not None
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        decoder.vision([PICTURE])
    counts = counter.get_flop_counts()["Global"]
    matmuls = sum(count for op, count in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    expected = vision_flops_per_feature(decoder.spec)
    assert matmuls == pytest.approx(PICTURE.num_features * expected, rel=1e-6)


def test_images_cost_what_their_matmuls_are_in_flops_and_in_tokens() -> None:
    spec = vision_twin(vision_model("qwen3_vl")).spec
    flops, tokens = build_flops_cost(spec), build_token_cost(spec)
    each = vision_flops_per_feature(spec)
    assert flops(100, 7) - flops(100) == pytest.approx(7 * each)
    assert tokens(100) == 100
    assert tokens(100, 7) - tokens(100) == pytest.approx(7 * each / forward_flops_per_token(spec, 0.0))
