"""Vision towers against transformers: features, logits, gradients, and checkpoints in both directions."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.oracle import gradients, relative
from tests.models.vision.small_vision import (
    IMAGE,
    VISION_KINDS,
    VISION_VARIANTS,
    Prompt,
    assemble,
    compare_features,
    hf_vision_logits,
    our_vision_logits,
    prompts_of,
    vision_model,
    vision_twin,
)

from miles.backends.native.runner.gpu_runner import supports_gpu_kernels
from miles.core.media import PlacedImage, make_image_input
from miles.kernels.runtime.triton_compat import HAVE_TRITON
from miles.models.capabilities import check_batch_invariance
from miles.models.checkpoint import hf
from miles.models.families.registry import find_family
from miles.models.vision.positions import compute_visible_ends

KINDS = (*VISION_KINDS, *VISION_VARIANTS)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_prompts_with_images_are_those_of_transformers(kind):
    model = vision_model(kind)
    decoder, prompts = vision_twin(model), prompts_of(kind)
    with torch.no_grad():
        ours, theirs = our_vision_logits(decoder, prompts), hf_vision_logits(model, prompts)
    assert relative(ours, theirs) <= 3e-5


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_images_are_those_of_transformers(kind):
    model = vision_model(kind)
    with torch.no_grad():
        pairs = list(compare_features(model, vision_twin(model), prompts_of(kind)))
    assert len(pairs) >= 3
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape and relative(ours, theirs) <= 3e-5


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_tower_and_decoder_are_those_of_transformers(kind):
    model = vision_model(kind)
    decoder, prompts = vision_twin(model), prompts_of(kind)
    target = torch.randn(sum(len(p.tokens) for p in prompts), 64, generator=torch.Generator().manual_seed(0))
    for logits in (our_vision_logits(decoder, prompts), hf_vision_logits(model, prompts)):
        (logits * target).sum().backward()
    theirs = assemble(decoder.spec, gradients(model))
    for name, parameter in decoder.named_parameters():
        if not parameter.requires_grad:  # a correction bias
            continue
        assert parameter.grad is not None, name
        assert relative(parameter.grad, theirs[name]) <= (2e-4 if kind == "gemma4_per_layer" else 1e-4), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_read_and_what_is_saved_is_what_transformers_reads(kind, tmp_path):
    model, prompts = vision_model(kind), prompts_of(kind)
    decoder, like = vision_twin(model), None
    if kind != "kimi_k25":  # transformers does not write the names of its published checkpoints
        like = tmp_path / "theirs"
        model.save_pretrained(like)
        decoder = hf.load(like, device="cpu", dtype=torch.float32)
    config = None if like else model.config.to_dict() | {"architectures": [type(model).__name__]}
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)
        hf.export(decoder, tmp_path / "ours", like=like, config=config, max_shard_bytes=20_000)
        assert hf.load(tmp_path / "ours", device="cpu").spec == decoder.spec
        again = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
        assert relative(our_vision_logits(decoder, prompts), hf_vision_logits(again, prompts)) <= 3e-5


@pytest.mark.parametrize("kind", [kind for kind in VISION_KINDS if find_family(kind).write is not None])
def test_a_model_from_scratch_is_saved_with_a_config_that_transformers_reads(kind, tmp_path):
    spec, prompts = vision_twin(vision_model(kind)).spec, prompts_of(kind)
    decoder = hf.init_random(spec, seed=3, device="cpu", dtype=torch.float32)
    hf.export(decoder, tmp_path)
    again = VISION_KINDS[kind].model.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        assert relative(our_vision_logits(decoder, prompts), hf_vision_logits(again, prompts)) <= 3e-5
    assert hf.load(tmp_path, device="cpu").spec == spec
    assert json.loads((tmp_path / "config.json").read_text())["vision_config"]


def test_crops_of_an_image_are_attended_in_both_directions_each_by_itself():
    """As pan-and-scan makes them: several runs of placeholders, with text between."""
    model, generator = vision_model("gemma3"), np.random.default_rng(3)
    crops = make_image_input({"pixel_values": generator.standard_normal((3, 3, 24, 24), np.float32)}, 27)
    run = [IMAGE] * 9
    tokens = np.array([4, 5, *run, 6, 7, *run, 8, *run, 9, 10, 11])
    prompt = Prompt(tokens, (PlacedImage(start=2, length=30, image=crops),))
    decoder = vision_twin(model)
    with torch.no_grad():
        ours, theirs = our_vision_logits(decoder, [prompt]), hf_vision_logits(model, [prompt])
    assert relative(ours, theirs) <= 3e-5
    ends = compute_visible_ends(decoder.spec, *prompt)
    assert ends is not None and sorted(set(ends[tokens == IMAGE].tolist())) == [11, 22, 32]


@pytest.mark.parametrize(
    "change", [{"softcap": 5.0}, {"sinks": True}, {"chunk": 8}], ids=lambda change: next(iter(change))
)
def test_attention_that_cannot_see_both_directions_is_refused(change):
    spec = vision_twin(vision_model("gemma3")).spec
    layer = spec.layers[1]
    layers = (spec.layers[0], replace(layer, mixer=replace(layer.mixer, **change)), *spec.layers[2:])
    with pytest.raises(ValueError, match="images attend in both directions, which layer 1 does not support"):
        replace(spec, layers=layers)


@pytest.mark.parametrize(("dim", "dtype"), [(256, torch.float32), (512, torch.bfloat16), (512, torch.float32)])
def test_heads_of_512_channels_have_triton_kernels_in_half_precision_and_are_not_exact(dim, dtype):
    """As those of the published Gemma 4 without a window."""
    decoder = vision_twin(vision_model("gemma4")).to(dtype)
    wide = replace(decoder.spec.layers[2], mixer=replace(decoder.spec.layers[2].mixer, head_dim=dim))
    spec = replace(decoder.spec, layers=(*decoder.spec.layers[:2], wide))
    supported = HAVE_TRITON and (dim, dtype) != (512, torch.float32)
    assert supports_gpu_kernels(spec, decoder, torch.device("cuda")) == supported
    problem = check_batch_invariance(spec)
    assert problem is None if dim == 256 else "layer 2 has heads of 512 channels" in str(problem)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_changes_the_logits_after_it_and_no_others(kind):
    decoder, (prompt, *_) = vision_twin(vision_model(kind)), prompts_of(kind)
    first = prompt.images[0]
    # The same sizes and other pixels.
    other = prompts_of(kind)[0]
    arrays = {name: array + 1 if array.dtype == np.float32 else array for name, array in first.image.arrays.items()}
    changed = type(first.image)(digest="0" * 64, num_features=first.image.num_features, arrays=arrays)
    swapped = other._replace(
        images=(type(first)(start=first.start, length=first.length, image=changed), *prompt.images[1:])
    )
    with torch.no_grad():
        before, after = our_vision_logits(decoder, [prompt]), our_vision_logits(decoder, [swapped])
    same = (before == after).all(1)
    # Chunked attention ends what an image changes.
    last = first.end if kind == "llama4" else len(same)
    assert same[: first.start].all() and not same[first.start : last].any()
