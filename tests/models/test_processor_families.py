"""Processors of further families: their replacement of an image is more than one repeated placeholder."""

import io
import json
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image
from tests.models.small_vision import build_vision_tokenizer, draw_png

from miles.core.errors import DataError, UsageError
from miles.core.media import find_placeholders
from miles.core.media_store import MediaStore
from miles.models.processor import MultimodalProcessor, load_processor

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}MARKER{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SQUARE = {"height": 16, "width": 16}
# family: marker, named and other tokens, classes of the processors, arguments of both, config
FAMILIES = {
    "gemma3": (
        "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        (),
        ("Gemma3Processor", "Gemma3ImageProcessor"),
        {"image_seq_length": 4},
        {"size": SQUARE},
        {"image_token_index": "<image_soft_token>"},
    ),
    "gemma4": (
        "<|image|>",
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
        ("<|video|>",),
        ("Gemma4Processor", "Gemma4ImageProcessor"),
        {},
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        {"image_token_id": "<|image|>"},
    ),
    "pixtral": (
        "[IMG]",
        {},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        ("PixtralProcessor", "PixtralImageProcessor"),
        {"patch_size": 4, "spatial_merge_size": 2},
        {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
        {"image_token_index": "[IMG]"},
    ),
    "idefics3": (
        "<image>",
        {},
        (
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            *(f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)),
        ),
        ("Idefics3Processor", "Idefics3ImageProcessor"),
        {"image_seq_len": 4},
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        {"image_token_id": "<image>"},
    ),
    "internvl": (
        "<IMG_CONTEXT>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        (),
        ("InternVLProcessor", "GotOcr2ImageProcessor"),
        {"image_seq_length": 4},
        {"size": SQUARE, "crop_to_patches": True, "max_patches": 4},
        {"image_token_id": "<IMG_CONTEXT>"},
    ),
    "glm4v": (
        "<|image|>",
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        (),
        ("Glm4vProcessor", "Glm4vImageProcessor"),
        {},
        {"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4},
        {"image_token_id": "<|image|>"},
    ),
}


def write(folder, family):
    marker, named, others, (processor_class, image_class), arguments, settings, config = FAMILIES[family]
    tokenizer = build_vision_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*dict.fromkeys([*named.values(), *others])]})
    tokenizer.chat_template = TEMPLATE.replace("MARKER", marker)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | named | {"extra_special_tokens": named}))
    written = {"processor_class": processor_class, **arguments}
    (folder / "processor_config.json").write_text(json.dumps(written))
    image = {"image_processor_type": image_class, "processor_class": processor_class, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in config.items()}
    (folder / "config.json").write_text(json.dumps(ids))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_pixels_are_those_of_transformers(family, tmp_path):
    processor = load_processor(write(tmp_path, family), media=MediaStore())
    assert isinstance(processor, MultimodalProcessor)
    parts = [{"type": "image", "image": processor.media.put(draw_png(seed, 40, 32))} for seed in (0, 1)]
    messages = [{"role": "user", "content": [parts[0], {"type": "text", "text": "the\n"}, parts[1]]}]
    theirs = [
        {**part, "image": Image.open(io.BytesIO(processor.media.get(part["image"])))} if "image" in part else part
        for part in messages[0]["content"]
    ]
    oracle = processor.hf_processor.apply_chat_template(
        [{"role": "user", "content": theirs}], tokenize=True, return_dict=True, add_generation_prompt=True
    )
    tokens, images = processor.render(messages, add_generation_prompt=True)
    assert tokens.tolist() == list(np.ravel(oracle["input_ids"]))
    assert len(images) == 2
    for placed in images:
        assert len(find_placeholders(tokens, placed, processor.image_token_id)) == placed.image.num_features > 0
    pixels = [placed.image.arrays["pixel_values"] for placed in images]
    expected = np.concatenate([np.asarray(p) for p in _rows(oracle)])
    np.testing.assert_array_equal(np.concatenate(pixels).reshape(expected.shape), expected)


def test_frames_of_a_gemma_4_video_are_images_behind_their_times(tmp_path):
    from transformers.video_utils import VideoMetadata

    processor = load_processor(write(tmp_path, "gemma4"), media=MediaStore())
    frames = [processor.media.put(draw_png(seed, 40, 32)) for seed in range(3)]
    video = processor.media.put_video(frames, 0.04)
    tokens, (placed,) = processor.encode_with_images("see <|video|> now", [video])
    arrays = placed.image.arrays
    assert placed.image.kind == "video" and arrays["pixel_values_videos"].shape[:2] == (1, 3)
    for number, frame in enumerate(frames):
        image = processor.process(frame).image.arrays
        np.testing.assert_array_equal(arrays["pixel_values_videos"][0, number], image["pixel_values"][0])
        np.testing.assert_array_equal(arrays["video_position_ids"][0, number], image["image_position_ids"][0])
    count = placed.image.num_features // 3
    assert len(find_placeholders(np.array(tokens), placed, processor.get_placeholder("video"))) == 3 * count > 0
    metadata = VideoMetadata(total_num_frames=3, fps=0.04, frames_indices=[0, 1, 2])
    known = {"num_soft_tokens_per_video": [count], "video_metadata": [metadata]}
    text = processor.hf_processor.replace_video_token(known, 0)
    assert "00:25 <|image>" in text and tokens == processor.encode(f"see {text} now")


def test_a_gemma_4_video_may_have_other_features_a_frame_than_an_image_but_no_other_patches(tmp_path):
    processor = load_processor(write(tmp_path, "gemma4"), media=MediaStore())
    video = processor.media.put_video([processor.media.put(draw_png(seed, 40, 32)) for seed in range(2)], 2.0)
    settings = tmp_path / "video_preprocessor_config.json"
    settings.write_text(json.dumps({"max_soft_tokens": 140}))
    assert processor.process(video).image.num_features > 2 * 70
    settings.write_text(json.dumps({"patch_size": 8}))
    other = load_processor(tmp_path, media=processor.media)
    with pytest.raises(DataError, match="have another patch_size"):
        other.process(video)


@pytest.mark.parametrize(
    ("processor_class", "image_class", "package"),
    [
        ("Llama4Processor", "Llama4ImageProcessor", "torchvision"),
        ("Kimi_K25Processor", "Kimi_K25ImageProcessor", "torchvision"),
        ("SmolVLMProcessor", "SmolVLMImageProcessor", "num2words"),
    ],
)
def test_a_processor_that_needs_another_package_says_so(processor_class, image_class, package, tmp_path):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    build_vision_tokenizer().save_pretrained(tmp_path)
    settings = {"processor_class": processor_class, "image_processor_type": image_class}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = load_processor(tmp_path, media=MediaStore())
    assert processor.encode("text alone")
    sentence = (
        f"{processor_class} of .* needs {package} .* run pip install 'miles-rl\\[vision\\]', or pip install {package}"
    )
    with pytest.raises(UsageError, match=sentence):
        processor.process(processor.media.put(draw_png(0)))


def _rows(oracle):
    values = oracle["pixel_values"]
    rows = [np.asarray(value) for value in values]
    return [np.stack(rows)] if rows[0].ndim < 4 else rows
