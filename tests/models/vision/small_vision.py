"""Small transformers models with vision towers and random weights, and prompts with images for them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tests.models.oracle import saved
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from miles.core.media import ImageInput, Images, PlacedImage, make_image_input
from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.numerics import FAST, Numerics
from miles.models.checkpoint import param_map
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.families.registry import find_family
from miles.models.spec import DecoderSpec
from miles.models.vision.inputs import build_vision_inputs
from miles.models.vision.positions import compute_rope_positions
from miles.train.packed_images import PackedImages
from miles.train.prefix_sharing import build_attention

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
IMAGE, VIDEO, START, END = 60, 61, 62, 63
CHUNKED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
INTERLEAVED = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
QWEN = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
TOWER3 = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
DELTA = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
TOWER35 = {key: value for key, value in TOWER3.items() if key != "deepstack_visual_indexes"}


class VisionKind(NamedTuple):
    """A model class, its config class and arguments, and how random images for it are made."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    text: dict[str, Any]
    vision: dict[str, Any]
    own: dict[str, Any]
    images: Callable[[np.random.Generator], list[ImageInput]]


def random_patches(generator: np.random.Generator, grid: Sequence[int], size: int, merge: int = 2) -> ImageInput:
    """Random patches of a grid of frames, rows and columns, as Qwen's processors return them."""
    video = grid[0] > 1
    pixels = generator.standard_normal((int(np.prod(grid)), size), np.float32)
    names = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
    arrays = {names[0]: pixels, names[1]: np.array([grid])}
    if video:
        arrays["second_per_grid_ts"] = np.array([2.0])
    return make_image_input(arrays, int(np.prod(grid)) // merge**2, kind="video" if video else "image")


def qwen_images(generator: np.random.Generator) -> list[ImageInput]:
    grids = ((1, 4, 6), (1, 2, 2), (1, 10, 8), (3, 4, 4))
    return [random_patches(generator, grid, 3 * 2 * 4 * 4) for grid in grids]


def sized_images(generator: np.random.Generator, merge: int = 2) -> list[ImageInput]:
    """Images of several sizes, padded at the right and bottom as in a batch."""
    images = []
    for height, width in ((16, 24), (8, 16), (24, 16)):
        pixels = np.zeros((1, 3, 24, 24), np.float32)
        pixels[:, :, :height, :width] = generator.standard_normal((1, 3, height, width), np.float32)
        arrays = {"pixel_values": pixels, "image_sizes": np.array([[height, width]])}
        images.append(make_image_input(arrays, height * width // (4 * merge) ** 2))
    return images


def tiled_images(generator: np.random.Generator) -> list[ImageInput]:
    """Images of one or several tiles of 16 x 16 pixels, each of 4 features."""
    tiles = [generator.standard_normal((count, 3, 16, 16), np.float32) for count in (1, 3, 2)]
    return [make_image_input({"pixel_values": pixels}, 4 * len(pixels)) for pixels in tiles]


def square_images(generator: np.random.Generator) -> list[ImageInput]:
    """Images of 24 x 24 pixels, each of 9 features."""
    pixels = generator.standard_normal((3, 1, 3, 24, 24), np.float32)
    return [make_image_input({"pixel_values": each}, 9) for each in pixels]


def rows_of_patches(generator: np.random.Generator) -> list[ImageInput]:
    """Images of several sizes as patches row by row."""
    images = []
    for rows, columns in ((4, 6), (2, 2), (10, 8)):
        pixels = generator.standard_normal((rows * columns, 3, 4, 4), np.float32)
        arrays = {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, columns]])}
        images.append(make_image_input(arrays, rows * columns // 4))
    return images


def padded_patches(generator: np.random.Generator) -> list[ImageInput]:
    """Images of several sizes as patches of values from 0 to 1, with their columns and rows, padded to 28 of them."""
    images = []
    for rows, columns in ((4, 6), (2, 2), (6, 4)):
        count = rows * columns
        pixels = np.zeros((1, 28, 3 * 4 * 4), np.float32)
        pixels[0, :count] = generator.random((count, 3 * 4 * 4), np.float32)
        at = np.full((1, 28, 2), -1)
        at[0, :count] = np.stack((np.arange(count) % columns, np.arange(count) // columns), 1)
        images.append(make_image_input({"pixel_values": pixels, "image_position_ids": at}, count // 4))
    video = {"pixel_values_videos": np.zeros((1, 3, 20, 3 * 4 * 4), np.float32)}
    video["pixel_values_videos"][:, :, :8] = generator.random((3, 8, 3 * 4 * 4), np.float32)
    video["video_position_ids"] = np.full((1, 3, 20, 2), -1)
    video["video_position_ids"][:, :, :8] = np.stack((np.arange(8) % 4, np.arange(8) // 4), 1)
    return [*images, make_image_input(video, 3 * 8 // 4, kind="video")]


GLM = {
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 0, 1],
    },
}
GLM_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "image_size": 20,
}
GLM_OWN = {"image_token_id": IMAGE, "video_token_id": VIDEO, "video_start_token_id": 58, "video_end_token_id": 59}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}
VIT = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
IDEFICS = {"image_token_id": IMAGE, "scale_factor": 2, "tie_word_embeddings": False, "pad_token_id": 0}

VISION_KINDS = {
    "qwen2_vl": VisionKind(
        Qwen2VLForConditionalGeneration,
        Qwen2VLConfig,
        CHUNKED,
        {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        QWEN,
        qwen_images,
    ),
    "qwen2_5_vl": VisionKind(
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        CHUNKED,
        {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 3,
        },
        QWEN,
        qwen_images,
    ),
    "qwen3_vl": VisionKind(Qwen3VLForConditionalGeneration, Qwen3VLConfig, INTERLEAVED, TOWER3, QWEN, qwen_images),
    "qwen3_vl_moe": VisionKind(
        Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, INTERLEAVED | MOE, TOWER3, QWEN, qwen_images
    ),
    "qwen3_5": VisionKind(Qwen3_5ForConditionalGeneration, Qwen3_5Config, DELTA, TOWER35, QWEN, qwen_images),
    "qwen3_5_moe": VisionKind(
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig,
        DELTA | MOE | {"shared_expert_intermediate_size": 16},
        TOWER35,
        QWEN,
        qwen_images,
    ),
    "glm4v": VisionKind(Glm4vForConditionalGeneration, Glm4vConfig, GLM, GLM_TOWER, GLM_OWN, qwen_images),
    "glm46v": VisionKind(Glm46VForConditionalGeneration, Glm46VConfig, GLM, GLM_TOWER, GLM_OWN, qwen_images),
    "glm_ocr": VisionKind(
        GlmOcrForConditionalGeneration,
        GlmOcrConfig,
        GLM | {"head_dim": 8},
        GLM_TOWER,
        GLM_OWN,
        qwen_images,
    ),
    "glm4v_moe": VisionKind(
        Glm4vMoeForConditionalGeneration,
        Glm4vMoeConfig,
        {
            "pad_token_id": None,
            "rope_parameters": GLM["rope_parameters"] | {"mrope_section": [1, 0, 1]},
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        GLM_TOWER,
        GLM_OWN,
        qwen_images,
    ),
    "mistral3": VisionKind(
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        PIXTRAL,
        {"image_token_index": IMAGE, "tie_word_embeddings": False},
        sized_images,
    ),
    "llava": VisionKind(
        LlavaForConditionalGeneration,
        LlavaConfig,
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        PIXTRAL,
        {
            "image_token_index": IMAGE,
            "tie_word_embeddings": False,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        partial(sized_images, merge=1),
    ),
    "internvl": VisionKind(
        InternVLForConditionalGeneration,
        InternVLConfig,
        {"model_type": "qwen2"},
        VIT | {"image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True},
        {"image_token_id": IMAGE, "tie_word_embeddings": False},
        tiled_images,
    ),
    "smolvlm": VisionKind(
        SmolVLMForConditionalGeneration, SmolVLMConfig, {"model_type": "llama"}, VIT, IDEFICS, tiled_images
    ),
    "idefics3": VisionKind(
        Idefics3ForConditionalGeneration, Idefics3Config, {"model_type": "llama"}, VIT, IDEFICS, tiled_images
    ),
    "kimi_k25": VisionKind(
        Kimi_K25ForConditionalGeneration,
        Kimi_K25Config,
        {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        {key: value for key, value in VIT.items() if key != "image_size"} | {"pos_emb_height": 5, "pos_emb_width": 5},
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "projection_hidden_size": 32, "tie_word_embeddings": False},
        rows_of_patches,
    ),
    "gemma3": VisionKind(
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
        },
        VIT | {"model_type": "siglip_vision_model", "image_size": 24, "vision_use_head": False},
        {"image_token_index": IMAGE, "mm_tokens_per_image": 9},
        square_images,
    ),
    "gemma4": VisionKind(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 30.0,
            "pad_token_id": 0,
        },
        {key: value for key, value in VIT.items() if key != "image_size"}
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "position_embedding_size": 8,
            "standardize": True,
        },
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 1000},
        padded_patches,
    ),
    "llama4": VisionKind(
        Llama4ForConditionalGeneration,
        Llama4Config,
        {
            "model_type": "llama4_text",
            "intermediate_size_mlp": 40,
            "num_local_experts": 2,
            "head_dim": 8,
            "attention_chunk_size": 16,
        },
        VIT
        | {"intermediate_size": 128, "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24},
        {"image_token_index": IMAGE, "tie_word_embeddings": False},
        tiled_images,
    ),
}

# Other models of these families: experts; embeddings for each layer; images that attend causally, and a value
# projection in every layer.
VISION_VARIANTS = {
    "gemma4_moe": VisionKind(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "pad_token_id": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "experts_implementation": "eager",
        },
        {key: value for key, value in VIT.items() if key != "image_size"}
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "position_embedding_size": 8,
            "standardize": True,
        },
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 1000},
        padded_patches,
    ),
    "gemma4_per_layer": VisionKind(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "sliding_window": 5,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + 2 * ["full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "pad_token_id": 0,
        },
        {key: value for key, value in VIT.items() if key != "image_size"}
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "position_embedding_size": 8,
            "use_clipped_linears": True,
        },
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 1000},
        padded_patches,
    ),
    "gemma4_causal": VisionKind(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {
            "head_dim": 16,
            "global_head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "pad_token_id": 0,
        },
        {key: value for key, value in VIT.items() if key != "image_size"}
        | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 8},
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 1000},
        padded_patches,
    ),
}


def vision_config(kind: str) -> PreTrainedConfig:
    """The config of a small model."""
    wanted = (VISION_KINDS | VISION_VARIANTS)[kind]
    config = wanted.config(text_config=TEXT | wanted.text, vision_config=dict(wanted.vision), **wanted.own)
    config._attn_implementation = "eager"
    return config


def vision_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """A transformers model whose weights are far from their initial values."""
    torch.manual_seed(seed)
    model = (VISION_KINDS | VISION_VARIANTS)[kind].model(vision_config(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "std_bias", "std_scale")):
                buffer.copy_(1 + 0.3 * torch.randn_like(buffer))
            if name.endswith(("_min", "_max")):  # a part of all values is clipped
                buffer.copy_((1 + 0.3 * torch.rand_like(buffer)) * (-1 if name.endswith("min") else 1))
    return model.eval()


def published_name(name: str) -> str:
    """The name in Kimi's published checkpoints, which transformers reads but does not write."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    return name.replace("vision_tower.encoder.patch_embed", "vision_tower.patch_embed").replace(
        "model.mm_projector", "mm_projector"
    )


def assemble(spec: DecoderSpec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors out of those of transformers, which may have stacked experts the other way round."""
    ours = {}
    family = find_family(spec.family)
    tensors = {family.published_name(published_name(name)): tensor for name, tensor in tensors.items()}
    for name, pieces in param_map.build_param_map(spec).items():
        ours[name] = torch.zeros(param_map.param_shape(pieces))
        for piece in pieces:
            tensor = tensors[piece.hf_name]
            piece.view(ours[name]).copy_(tensor if tensor.shape == piece.shape else tensor.transpose(-1, -2))
    return ours


def vision_twin(model: PreTrainedModel, dtype: torch.dtype = torch.float32, numerics: Numerics = FAST) -> Decoder:
    """Our decoder with a transformers model's weights."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    decoder = Decoder(spec_from_config(config), device="cpu", dtype=dtype, numerics=numerics)
    decoder.load_state_dict(assemble(decoder.spec, saved(model)))
    return decoder


class Prompt(NamedTuple):
    """Tokens with images among them."""

    tokens: np.ndarray
    images: Images


def place(parts: Sequence[int | ImageInput | tuple[int, ImageInput]], seed: int = 0, video: int = VIDEO) -> Prompt:
    """Text (a number of random tokens) and images one after the other.

    An image given with a number of text tokens is a video with so many tokens between its frames.
    """
    generator = np.random.default_rng(seed)
    tokens: list[int] = []
    placed: list[PlacedImage] = []
    for part in parts:
        if isinstance(part, int):
            tokens += generator.integers(0, 50, part).tolist()
            continue
        gap, image = part if isinstance(part, tuple) else (0, part)
        placeholder = video if image.kind == "video" else IMAGE
        start = len(tokens)
        frames = count_frames(image) if gap else 1
        for frame in range(frames):
            tokens += generator.integers(0, 50, gap).tolist() if frame else []
            tokens += [placeholder] * (image.num_features // frames)
        placed.append(PlacedImage(start=start, length=len(tokens) - start, image=image))
    return Prompt(np.array(tokens), tuple(placed))


def count_frames(video: ImageInput) -> int:
    """The frames of a video, or its temporal patches."""
    grid = video.arrays.get("video_grid_thw")
    return video.arrays["video_position_ids"].shape[1] if grid is None else int(grid[0, 0])


def prompts_of(kind: str) -> list[Prompt]:
    """Several images in a prompt, one that two prompts share, text alone, a video."""
    a, b, c, *videos = (VISION_KINDS | VISION_VARIANTS)[kind].images(np.random.default_rng(1))
    prompts = [place([3, a, 2, b, 1, c, 4], 1), place([5, a, 3], 2), place([9], 3), place([b, 6], 4)]
    if videos and kind.startswith("qwen2"):
        prompts += [place([2, videos[0], 1, a, 5], 5), place([4, videos[0]], 6)]
    elif videos and kind.startswith(("qwen3", "gemma4")):
        prompts += [place([2, (2, videos[0]), 1, a, 5], 5), place([4, (1, videos[0])], 6)]
    elif videos:  # transformers takes either images or videos in a prompt
        prompts += [place([2, (2, videos[0]), 5], 5, IMAGE)]
    return prompts


def hf_arguments(prompt: Prompt) -> dict[str, Tensor]:
    """What transformers' model takes for a prompt."""
    tokens = torch.from_numpy(prompt.tokens)
    out: dict[str, Tensor] = {"input_ids": tokens[None]}
    names = dict.fromkeys(name for placed in prompt.images for name in placed.image.arrays)
    for name in names:
        arrays = [placed.image.arrays[name] for placed in prompt.images if name in placed.image.arrays]
        out[name] = torch.from_numpy(np.concatenate(arrays))
    if "image_grid_thw" in out or "video_grid_thw" in out:
        types = torch.zeros_like(tokens)
        for placed in prompt.images:
            run = tokens[placed.start : placed.end]
            value = 2 if placed.image.kind == "video" else 1
            types[placed.start : placed.end] = torch.where((run == IMAGE) | (run == VIDEO), value, 0)
        out["mm_token_type_ids"] = types[None].int()
    return out


def token_types(prompt: Prompt) -> Tensor:
    """One where a token is a placeholder of an image and two of a video, as Gemma's processors return it."""
    types = np.zeros_like(prompt.tokens)
    for placed in prompt.images:
        run, kinds = prompt.tokens[placed.start : placed.end], {"image": (IMAGE, 1), "video": (VIDEO, 2)}
        token, value = kinds[placed.image.kind]
        types[placed.start : placed.end] = np.where(run == token, value, 0)
    return torch.from_numpy(types)[None]


def hf_vision_logits(model: PreTrainedModel, prompts: Sequence[Prompt]) -> Tensor:
    """Each prompt on its own, one after the other."""
    logits = []
    for prompt in prompts:
        model.base_model.rope_deltas = None
        arguments = hf_arguments(prompt)
        if "Idefics3" in type(model).__name__ or "SmolVLM" in type(model).__name__:
            arguments |= {"pixel_values": arguments["pixel_values"][None]} if prompt.images else {}
        if "Gemma" in type(model).__name__:
            name = "mm_token_type_ids" if "Gemma4" in type(model).__name__ else "token_type_ids"
            arguments[name] = token_types(prompt)
        logits.append(model(**arguments).logits[0])
    return torch.cat(logits)


def compare_features(
    model: PreTrainedModel, decoder: Decoder, prompts: Sequence[Prompt]
) -> Iterator[tuple[Tensor, ...]]:
    """Our features and those of transformers, of the images of each prompt; then those of deepstack layers."""
    for prompt in prompts:
        images = [placed.image for placed in prompt.images if placed.image.kind == "image"]
        if not images:
            continue
        ours = decoder.vision(images)
        known = {name: torch.from_numpy(np.concatenate([i.arrays[name] for i in images])) for name in images[0].arrays}
        if "Idefics3" in type(model).__name__ or "SmolVLM" in type(model).__name__:
            known["pixel_values"] = known["pixel_values"][None]
        if "Llama4" in type(model).__name__:
            known["vision_feature_select_strategy"] = "default"
        theirs = model.get_image_features(**known)
        if "Llama4" in type(model).__name__:
            embeds = model.multi_modal_projector(theirs.last_hidden_state.flatten(0, 1))
        else:
            found = theirs.pooler_output
            embeds = torch.cat(list(found)) if isinstance(found, list | tuple) else found.reshape(-1, found.shape[-1])
        yield ours.embeds_FD, embeds
        yield from zip(ours.deepstack, getattr(theirs, "deepstack_features", None) or (), strict=True)


def packed_arguments(decoder: Decoder, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The arguments of a packed forward."""
    spec = decoder.spec
    lengths = [len(prompt.tokens) for prompt in prompts]
    if spec.vision is not None and spec.vision.positions == "mrope":
        positions = np.concatenate([compute_rope_positions(spec, *prompt)[0] for prompt in prompts], 1)
    else:
        positions = np.concatenate([np.arange(n) for n in lengths])
    starts = np.cumsum(lengths) - lengths
    packed = PackedImages(tokens=tuple(p.tokens for p in prompts), images=tuple(p.images for p in prompts))
    sequences = [(int(start), *prompt) for start, prompt in zip(starts, prompts, strict=True)]
    return {
        "tokens_T": torch.from_numpy(np.concatenate([prompt.tokens for prompt in prompts])),
        "positions_T": torch.from_numpy(positions),
        "attn_backend": build_attention(
            lengths, (), torch.device("cpu"), numerics=FAST, visible_ends_T=packed.build_visible_ends(spec)
        ),
        "vision": build_vision_inputs(spec, sequences, "cpu"),
    }


def our_vision_logits(decoder: Decoder, prompts: Sequence[Prompt]) -> Tensor:
    """All prompts packed, in one forward."""
    hidden = decoder(**packed_arguments(decoder, prompts))
    return compute_logits(hidden, decoder.head(), decoder.spec.logit_softcap, numerics=decoder.numerics)
