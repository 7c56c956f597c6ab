"""Images as prompts hold them: the tokens transformers' own processor gives, and one input for each image."""

import asyncio
import io
import json

import numpy as np
import pytest
from PIL import Image
from tests.models.small_vision import KINDS, draw_image, draw_png, write_processor

from miles.core.errors import DataError, UsageError
from miles.core.media import find_placeholders
from miles.core.media_store import MediaStore
from miles.models.processor import MultimodalProcessor, load_processor
from miles.rollout.images import encode_chat


def build(folder, kind="qwen2_5_vl", **options) -> MultimodalProcessor:
    processor = load_processor(write_processor(folder, kind), media=MediaStore(), **options)
    assert isinstance(processor, MultimodalProcessor)
    return processor


def ask(processor, *seeds, text="What is it?"):
    images = [{"type": "image", "image": processor.media.put(draw_png(seed, 40 + 8 * seed, 32))} for seed in seeds]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_pixels_are_those_of_transformers(kind, tmp_path):
    processor = build(tmp_path, kind)
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Look."}]},
        *ask(processor, 0, 3),
        {"role": "assistant", "content": [{"type": "text", "text": "the thing"}]},
        *ask(processor, 1, text="And this?\n\n"),
    ]
    theirs = [
        {
            **message,
            "content": [
                {"type": "image", "image": Image.open(io.BytesIO(processor.media.get(part["image"])))}
                if part["type"] == "image"
                else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]
    oracle = processor.hf_processor.apply_chat_template(
        theirs, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="np"
    )
    tokens, images = processor.render(messages, add_generation_prompt=True)
    assert tokens.tolist() == oracle["input_ids"][0].tolist()
    assert [placed.image.arrays["image_grid_thw"].tolist()[0] for placed in images] == oracle["image_grid_thw"].tolist()
    pixels = np.concatenate([placed.image.arrays["pixel_values"] for placed in images])
    np.testing.assert_array_equal(pixels, oracle["pixel_values"])
    for placed in images:
        assert len(find_placeholders(tokens, placed, processor.image_token_id)) == placed.length


def test_an_image_is_processed_once_while_it_is_cached_and_again_after_eviction(tmp_path):
    processor = build(tmp_path, cache_bytes=1)
    (first,) = processor.render(ask(processor, 0))[1]
    (again,) = processor.render(ask(processor, 0))[1]
    assert again.image is first.image
    processor.render(ask(processor, 1))
    (later,) = processor.render(ask(processor, 0))[1]
    assert later.image is not first.image and later.image == first.image
    assert first.image.source in processor.media.put(draw_png(0, 40, 32))


def test_images_are_prepared_off_the_event_loop_and_together(tmp_path):
    processor = build(tmp_path)
    messages = ask(processor, *range(6))

    async def run():
        work = asyncio.gather(*(processor.prepare(messages) for _ in range(8)))
        ticks = 0
        while not work.done():
            ticks += 1
            await asyncio.sleep(0)
        await work
        return ticks

    assert asyncio.run(run()) > 1
    assert len({placed.image.digest for placed in processor.render(messages)[1]}) == 6


def test_a_text_that_holds_the_marker_itself_is_refused(tmp_path):
    processor = build(tmp_path)
    with pytest.raises(DataError, match=r"2 image markers <\|image_pad\|> for 1 images"):
        processor.render(ask(processor, 0, text="<|image_pad|>"))


def test_tokens_with_one_marker_for_each_image_are_expanded_and_others_kept(tmp_path):
    processor = build(tmp_path)
    messages = ask(processor, 0, 2)
    references = [part["image"] for part in messages[0]["content"][:2]]
    short = processor.encode(processor.render_chat_text(messages, add_generation_prompt=True))
    tokens, images = processor.expand_tokens(short, references)
    whole, placed = processor.render(messages, add_generation_prompt=True)
    assert tokens == whole.tolist() and images == placed
    with pytest.raises(DataError, match=r"2 image markers .* for 1 images"):
        processor.expand_tokens(short, references[:1])


def test_a_template_that_reads_only_parts_gets_parts(tmp_path):
    write_processor(tmp_path, "qwen2_vl")
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>"
        "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    processor = load_processor(tmp_path, media=MediaStore())
    assert processor.render_chat_text([{"role": "user", "content": "plain"}]) == "plain"


def test_a_text_checkpoint_refuses_images(tmp_path):
    write_processor(tmp_path, "qwen2_vl")
    (tmp_path / "preprocessor_config.json").unlink()
    tokenizer = load_processor(tmp_path)
    assert not isinstance(tokenizer, MultimodalProcessor)
    part = {"type": "image", "image": "sha256:" + 64 * "0"}
    with pytest.raises(DataError, match="reads text only"):
        encode_chat(tokenizer, "<|image_pad|>", [{"role": "user", "content": [part]}])


def test_unknown_processors_are_named_when_the_first_image_comes(tmp_path):
    write_processor(tmp_path, "qwen2_vl")
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"processor_class": "NobodysProcessor"}))
    processor = load_processor(tmp_path, media=MediaStore())
    assert processor.encode("text")
    with pytest.raises(UsageError, match=r"NobodysProcessor.*--trust-remote-code"):
        processor.render(ask(processor, 0))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[: len(data) // 2], "is truncated"),
        (lambda data: data[:60] + bytes(40) + data[100:], r"is (damaged|truncated)"),
    ],
)
def test_damaged_pixels_are_named_with_their_origin(damage, reason, tmp_path):
    processor = build(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, format="PNG")
    reference = processor.media.put(damage(out.getvalue()), origin="data.jsonl, line 3, column images")
    with pytest.raises(DataError, match=rf"data.jsonl, line 3, column images: the image {reason}"):
        processor.process(reference)


def test_an_image_the_processor_rejects_is_named(tmp_path):
    processor = build(tmp_path)
    out = io.BytesIO()
    draw_image(0, 1, 900).save(out, format="PNG")
    with pytest.raises(DataError, match=r"rejects the image of 1 x 900 pixels"):
        processor.process(processor.media.put(out.getvalue()))
