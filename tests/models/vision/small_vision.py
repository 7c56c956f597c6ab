"""Small transformers models with vision towers and random weights, and prompts with images of several sizes for them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tests.models.oracle import assemble, saved
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from miles.core.media import ImageInput, Images, PlacedImage, make_image_input
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.numerics import FAST, Numerics
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.vision.batch import build_vision_inputs
from miles.models.vision.positions import compute_rope_positions

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
}


def vision_model(kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A transformers model whose weights are far from their initial values."""
    wanted = VISION_KINDS[kind]
    torch.manual_seed(seed)
    text = {key: value for key, value in (TEXT | wanted.text | changes).items()}
    config = wanted.config(text_config=text, vision_config=dict(wanted.vision), **wanted.own)
    config._attn_implementation = "eager"
    model = wanted.model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise)
    return model.eval()


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


def place(parts: Sequence[int | ImageInput | tuple[int, ImageInput]], seed: int = 0) -> Prompt:
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
        placeholder = VIDEO if image.kind == "video" else IMAGE
        start = len(tokens)
        frames = int(image.arrays["video_grid_thw"][0, 0]) if gap else 1
        for frame in range(frames):
            tokens += generator.integers(0, 50, gap).tolist() if frame else []
            tokens += [placeholder] * (image.num_features // frames)
        placed.append(PlacedImage(start=start, length=len(tokens) - start, image=image))
    return Prompt(np.array(tokens), tuple(placed))


def prompts_of(kind: str) -> list[Prompt]:
    """Several images in a prompt, one that two prompts share, text alone, a video."""
    a, b, c, *videos = VISION_KINDS[kind].images(np.random.default_rng(1))
    prompts = [place([3, a, 2, b, 1, c, 4], 1), place([5, a, 3], 2), place([9], 3), place([b, 6], 4)]
    if videos:
        video = (2, videos[0]) if kind.startswith("qwen3") else videos[0]
        prompts += [place([2, video, 1, a, 5], 5), place([4, video], 6)]
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
        out["mm_token_type_ids"] = ((tokens == IMAGE).int() + 2 * (tokens == VIDEO).int())[None]
    return out


def hf_vision_logits(model: PreTrainedModel, prompts: Sequence[Prompt]) -> Tensor:
    """Each prompt on its own, one after the other."""
    logits = []
    for prompt in prompts:
        model.base_model.rope_deltas = None
        logits.append(model(**hf_arguments(prompt)).logits[0])
    return torch.cat(logits)


def packed_arguments(decoder: Decoder, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The arguments of a packed forward."""
    spec = decoder.spec
    lengths = [len(prompt.tokens) for prompt in prompts]
    if spec.vision is not None and spec.vision.positions == "mrope":
        positions = np.concatenate([compute_rope_positions(spec, *prompt)[0] for prompt in prompts], 1)
    else:
        positions = np.concatenate([np.arange(n) for n in lengths])
    starts = np.cumsum(lengths) - lengths
    sequences = [(int(start), *prompt) for start, prompt in zip(starts, prompts, strict=True)]
    return {
        "tokens_T": torch.from_numpy(np.concatenate([prompt.tokens for prompt in prompts])),
        "positions_T": torch.from_numpy(positions),
        "attn_backend": VarlenAttentionBackend(lengths, "cpu"),
        "vision": build_vision_inputs(spec, sequences, "cpu"),
    }


def our_vision_logits(decoder: Decoder, prompts: Sequence[Prompt]) -> Tensor:
    """All prompts packed, in one forward."""
    hidden = decoder(**packed_arguments(decoder, prompts))
    return compute_logits(hidden, decoder.head(), decoder.spec.logit_softcap, numerics=decoder.numerics)
