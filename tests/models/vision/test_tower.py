"""Vision towers: batch invariance, positions, inputs of packed batches, refusals, and what counts their weights."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.kernels.device import DEVICE
from tests.models.oracle import relative
from tests.models.vision.small_vision import (
    IMAGE,
    VIDEO,
    VISION_KINDS,
    Prompt,
    hf_arguments,
    our_vision_logits,
    packed_arguments,
    place,
    prompts_of,
    qwen_images,
    random_patches,
    vision_model,
    vision_twin,
)

from miles.core.errors import UsageError
from miles.core.media import make_image_input
from miles.kernels.attention.bidirectional import Segments, bidirectional_attention
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.accounting.params import ShardingDegrees, list_rank_params, parameter_count, vision_parameter_count
from miles.models.activation_checkpointing import set_recompute
from miles.models.checkpoint import hf, param_map
from miles.models.families import spec_from_config
from miles.models.lora.targets import select_targets
from miles.models.parallel.tp_sharding import compute_tp_shards, shard_param, shard_spec
from miles.models.quantization import plan_quantization
from miles.models.vision.inputs import build_vision_inputs
from miles.models.vision.positions import compute_rope_positions
from miles.precision.formats import FORMATS, QuantizationSpec

# One of each mechanism: windows, deepstack and a position table, tiles of any size, a class token with RoPE.
MECHANISMS = ("qwen2_5_vl", "qwen3_vl", "glm4v", "mistral3", "llama4")


@pytest.mark.parametrize("kind", MECHANISMS)
def test_exact_features_do_not_depend_on_the_batch_the_threads_or_gradients(kind):
    tower = vision_twin(vision_model(kind), numerics=BATCH_INVARIANT).to(DEVICE).vision
    assert tower is not None
    images = VISION_KINDS[kind].images(np.random.default_rng(0))[:3]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = tower(images)
        assert together.embeds_FD.requires_grad
        torch.set_num_threads(1)
        with torch.inference_mode():
            alone = [tower([image]) for image in reversed(images)][::-1]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together.embeds_FD, torch.cat([each.embeds_FD for each in alone]))
    for layer, features in enumerate(together.deepstack):
        assert torch.equal(features, torch.cat([each.deepstack[layer] for each in alone]))


@pytest.mark.parametrize("kind", MECHANISMS)
def test_fast_and_exact_features_agree(kind):
    model = vision_model(kind)
    images = VISION_KINDS[kind].images(np.random.default_rng(0))
    with torch.no_grad():
        fast, exact = (
            vision_twin(model, numerics=n).to(DEVICE).vision(images)
            for n in (vision_twin(model).numerics, BATCH_INVARIANT)
        )
        wide = vision_twin(model, torch.float64).vision(images)
    assert relative(fast.embeds_FD, exact.embeds_FD) <= 1e-5
    assert relative(exact.embeds_FD.cpu(), wide.embeds_FD) <= 1e-5


@pytest.mark.parametrize("kind", ("qwen3_vl", "llama4"))
def test_recomputed_blocks_give_the_same_gradients(kind):
    model, prompts = vision_model(kind), prompts_of(kind)[:2]
    gradients = []
    for mode in ("none", "full", "selective"):
        decoder = vision_twin(model)
        set_recompute(decoder, mode)
        our_vision_logits(decoder, prompts).square().sum().backward()
        gradients.append({name: p.grad for name, p in decoder.named_parameters() if p.grad is not None})
    assert any(name.startswith("vision.blocks") for name in gradients[0])
    for one, other in pairwise(gradients):
        assert all(relative(one[name], other[name]) <= 1e-6 for name in one)


def test_text_positions_in_three_axes_are_plain_rope():
    decoder = vision_twin(vision_model("qwen3_vl"))
    arguments = packed_arguments(decoder, [place([9], 3), place([4], 5)])
    assert arguments["vision"] is None and arguments["positions_T"].shape == (3, 13)
    with torch.no_grad():
        plain = decoder(**{**arguments, "positions_T": arguments["positions_T"][0]})
        assert torch.equal(decoder(**arguments), plain)


def test_features_that_were_encoded_before_replace_images():
    decoder = vision_twin(vision_model("qwen3_vl"))
    arguments = packed_arguments(decoder, prompts_of("qwen3_vl"))
    given = arguments["vision"]
    with torch.no_grad():
        features = decoder.vision(given.images)
        again = decoder(**{**arguments, "vision": replace(given, images=(), features=features)})
        assert torch.equal(decoder(**arguments), again)


def test_an_image_that_two_sequences_share_is_encoded_once():
    decoder, prompts = vision_twin(vision_model("qwen2_vl")), prompts_of("qwen2_vl")
    inputs = packed_arguments(decoder, prompts)["vision"]
    digests = [image.digest for image in inputs.images]
    assert len(set(digests)) == len(digests) == 4
    assert sum(len(prompt.images) for prompt in prompts) == 8
    assert len(inputs.token_I) == sum(placed.image.num_features for prompt in prompts for placed in prompt.images)


@pytest.mark.parametrize("kind", ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"))
def test_rope_positions_are_those_of_transformers(kind):
    model, spec = vision_model(kind), vision_twin(vision_model(kind)).spec
    for prompt in prompts_of(kind):
        ours, delta = compute_rope_positions(spec, *prompt)
        if not prompt.images:
            assert delta == 0 and (ours == np.arange(len(prompt.tokens))).all()
            continue
        known = {key: value for key, value in hf_arguments(prompt).items() if not key.startswith("pixel")}
        theirs, their_delta = model.model.get_rope_index(**known)
        assert (ours == theirs[:, 0].numpy()).all()
        # After a video of many frames transformers generates at positions behind the last frame, but the positions of
        # a whole sequence, which a trainer sees, continue behind its height and width.
        if not any(placed.image.kind == "video" for placed in prompt.images):
            assert delta == int(their_delta)
        longer = Prompt(np.concatenate((prompt.tokens, [1, 2, 3])), prompt.images)
        after = compute_rope_positions(spec, *longer)[0][:, len(prompt.tokens) :]
        assert (after == np.arange(len(prompt.tokens), len(longer.tokens)) + delta).all()


def test_a_video_of_frames_without_a_rate_counts_a_second_each():
    spec = vision_twin(vision_model("qwen2_5_vl")).spec
    video = qwen_images(np.random.default_rng(0))[3]
    bare = make_image_input(
        {name: array for name, array in video.arrays.items() if name != "second_per_grid_ts"}, 12, kind="video"
    )
    positions, _ = compute_rope_positions(spec, *place([bare]))
    assert positions[0].tolist() == [0] * 4 + [3] * 4 + [6] * 4


def test_wrong_images_are_refused_with_what_is_wrong():
    decoder = vision_twin(vision_model("qwen3_vl"))
    generator = np.random.default_rng(0)
    good = random_patches(generator, (1, 4, 4), 96)
    for arrays, count, message in (
        ({"pixel_values": good.arrays["pixel_values"]}, 4, "image_grid_thw is missing"),
        ({"image_grid_thw": good.arrays["image_grid_thw"]}, 4, "pixel_values is missing"),
        (dict(good.arrays), 5, "features, not 5"),
        ({**good.arrays, "image_grid_thw": np.array([1, 4, 3])}, 3, "not a multiple of 2"),
        ({**good.arrays, "pixel_values": good.arrays["pixel_values"][1:]}, 4, "16 patches of 96 values are needed"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.vision([make_image_input(arrays, count)])
    with pytest.raises(ValueError, match="no images"):
        decoder.vision([])
    prompt = place([3, good, 2])
    for tokens in (prompt.tokens[:-4], np.where(prompt.tokens == IMAGE, VIDEO, prompt.tokens)):
        with pytest.raises(ValueError, match="placeholder tokens"):
            build_vision_inputs(decoder.spec, [(0, tokens, prompt.images)], "cpu")
    with pytest.raises(ValueError, match="has no vision tower"):
        build_vision_inputs(replace(decoder.spec, vision=None), [(0, *prompt)], "cpu")
    video = qwen_images(generator)[3]
    with pytest.raises(ValueError, match="takes no videos"):
        build_vision_inputs(vision_twin(vision_model("llama4")).spec, [(0, *place([video]))], "cpu")


def test_tiles_of_another_size_are_refused():
    tower = vision_twin(vision_model("smolvlm")).vision
    pixels = np.ones((1, 3, 24, 24), np.float32)
    with pytest.raises(ValueError, match="takes 4 x 4 only"):
        tower([make_image_input({"pixel_values": pixels}, 9)])
    padded = {"pixel_values": pixels[..., :16, :16], "pixel_attention_mask": np.array([[[1, 0]]])}
    with pytest.raises(ValueError, match="padding inside a tile"):
        tower([make_image_input(padded, 4)])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3_vl", {"vision_config": None}, "vision_config of config.json is missing"),
        ("qwen3_vl", {"text_config": None}, "text_config of config.json is missing"),
        ("qwen3_vl", {"vision_config.hidden_act": "tanh"}, "vision_config.hidden_act of config.json is 'tanh'"),
        ("qwen3_vl", {"vision_config.out_hidden_size": 64}, "the text model has 32 channels"),
        ("qwen3_vl", {"vision_config.deepstack_visual_indexes": [7]}, "vision_config.deepstack_visual_indexes"),
        ("qwen3_vl", {"image_token_id": "<image>"}, "image_token_id of config.json"),
        ("mistral3", {"text_config.model_type": "mamba"}, "text_config.model_type of config.json is mamba"),
        ("internvl", {"vision_config.use_qk_norm": True}, "vision_config.use_qk_norm"),
        ("glm_ocr", {"vision_config.out_hidden_size": 64}, "the text model has 32 channels"),
        ("gemma4", {"text_config.num_kv_shared_layers": 3}, "num_kv_shared_layers of config.json is 3, of 3 layers"),
        ("gemma4", {"text_config.num_kv_shared_layers": 2}, "no earlier layer is like layer 1"),
        ("gemma4", {"text_config.per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config of config.json"),
    ],
)
def test_configs_that_are_not_implemented_are_refused_with_the_key(kind, changes, message):
    model = vision_model(kind)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    for path, value in changes.items():
        *outer, key = path.split(".")
        (config[outer[0]] if outer else config)[key] = value
    with pytest.raises(UsageError, match=message):
        spec_from_config(config)


def test_the_layer_that_predicts_more_tokens_of_glm_ocr_is_not_used():
    spec = vision_twin(vision_model("glm_ocr")).spec
    names = [f"model.language_model.layers.{i}.self_attn.q_proj.weight" for i in range(spec.num_layers + 1)]
    assert [param_map.is_ignorable(spec, name) for name in names] == spec.num_layers * [False] + [True]


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_the_tower_is_counted_replicated_not_quantized_and_without_adapters(kind):
    decoder = vision_twin(vision_model(kind))
    spec = decoder.spec
    sizes = {name: p.numel() for name, p in decoder.named_parameters()}
    tower = {name for name in sizes if name.startswith("vision.")}
    assert parameter_count(spec) == sum(sizes.values())
    assert vision_parameter_count(spec) == sum(sizes[name] for name in tower) > 0
    assert sum(p.count for p in list_rank_params(spec, ShardingDegrees())) == sum(sizes.values())
    quantized = replace(spec, quantization=QuantizationSpec(format=FORMATS["fp8_channel"], packed=False))
    assert plan_quantization(quantized).keys() and not plan_quantization(quantized).keys() & tower
    assert not {target.param_name for target in select_targets(spec, None, None)} & tower
    assert compute_tp_shards(spec).keys() == sizes.keys()
    assert shard_spec(spec, 2).vision == spec.vision
    for name, parameter in decoder.named_parameters():
        if name in tower:
            assert shard_param(spec, name, parameter, 1, 2) is parameter


def test_a_random_tower_starts_with_small_features():
    spec = vision_twin(vision_model("internvl")).spec
    decoder = hf.init_random(spec, seed=0, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        features = decoder.vision(VISION_KINDS["internvl"].images(np.random.default_rng(0)))
    assert 0 < features.embeds_FD.abs().max() < 1


def test_bidirectional_attention_of_segments_is_attention_of_each():
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 5, 3, 1, 5]
    q, k, v = (torch.randn(sum(lengths), 2, 8, generator=generator, requires_grad=True) for _ in range(3))
    out = bidirectional_attention(q, k, v, Segments(lengths, "cpu"), 0.3, numerics=FAST)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    expected = [
        torch.einsum("hst,thd->shd", torch.einsum("shd,thd->hst", a * 0.3, b).softmax(-1), c) for a, b, c in parts
    ]
    assert relative(out, torch.cat(expected)) <= 1e-6
    gradients = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, torch.cat(expected))]
    assert all(relative(one, other) <= 1e-5 for one, other in zip(*gradients, strict=True))
