"""Images of recorded rollouts: hashes and places in the file, each file once in media/, and the same pixels again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.models.small_vision import draw_png, write_processor

from miles.core.errors import DataError
from miles.core.events import BatchTaken
from miles.core.media import make_image_input
from miles.core.media_store import MediaStore
from miles.core.types import Author, Batch, Group, Prompt, Reward, Span, Status, Trajectory, Version
from miles.models.processor import load_processor
from miles.observe.rollout_reader import read_step_rollouts, restore_images
from miles.observe.rollouts import write_step
from miles.observe.trajectory_view import render_trajectory


@pytest.fixture
def processor(tmp_path):
    return load_processor(write_processor(tmp_path / "model", "qwen3_vl"), media=MediaStore(tmp_path / "run/media"))


def make_group(processor) -> Group:
    def part(seed):
        return {"type": "image", "image": processor.media.put(draw_png(seed))}

    messages = [{"role": "user", "content": [{"type": "text", "text": "hm "}, part(0), part(1)]}]
    tokens, images = processor.render(messages, add_generation_prompt=True)
    reply = np.array(processor.encode("ok<|im_end|>"), np.int32)
    zeros = np.zeros(len(reply), np.float32)
    tool_tokens, tool_images = processor.encode_with_images("see <|image_pad|>.", [part(0)["image"]])
    spans = (
        Span(author=Author.PROMPT, tokens=tokens, images=images),
        Span(author=Author.POLICY, tokens=reply, logprobs=zeros, version=Version()),
        Span(author=Author.ENV, tokens=np.array(tool_tokens, np.int32), images=tool_images),
    )
    trajectory = Trajectory(branches=(spans,), status=Status.COMPLETED, reward=Reward(value=1.0))
    return Group(prompt=Prompt(id=3, messages=messages), trajectories=(trajectory,))


def write(group, path: Path) -> Path:
    batch = Batch(step=1, samples=(), num_groups=1)
    write_step(path, BatchTaken(step=1, tickets=(0,), groups=(group,), batch=batch))
    return path


def test_a_recorded_trajectory_comes_back_with_its_pixels(processor, tmp_path):
    group = make_group(processor)
    read = read_step_rollouts(write(group, tmp_path / "step-000001.parquet"))
    assert read.groups[0].prompt.messages == group.prompt.messages
    restored = restore_images(read, processor.load_image)
    pairs = zip(group.trajectories[0].spans, restored.groups[0].trajectories[0].spans, strict=True)
    for ours, again in pairs:
        assert ours.tokens.tolist() == again.tokens.tolist() and ours.images == again.images
        for one, other in zip(ours.images, again.images, strict=True):
            np.testing.assert_array_equal(one.image.arrays["pixel_values"], other.image.arrays["pixel_values"])


def test_other_pixels_are_refused(processor, tmp_path):
    read = read_step_rollouts(write(make_group(processor), tmp_path / "step-000001.parquet"))

    def changed(source):
        image = processor.load_image(source)
        arrays = {name: array + 1 for name, array in image.arrays.items()}
        return make_image_input(arrays, image.num_features, source=source)

    with pytest.raises(DataError, match="has other pixels now"):
        restore_images(read, changed)


def test_a_printed_trajectory_names_its_images(processor, tmp_path):
    group = make_group(processor)
    text = render_trajectory(group.trajectories[0], processor, colour=False)
    source = group.trajectories[0].branches[0][2].images[0].image.source
    assert text.count(f"[image {source[:12]}, ") == 2 and "<|image_pad|>" not in text
    assert "hm <|vision_start|>[image" in text and "see [image" in text


def test_files_without_images_are_read_as_before(processor, tmp_path):
    group = make_group(processor)
    (spans,) = group.trajectories[0].branches
    plain = tuple(replace(span, images=()) for span in spans)
    group = replace(group, trajectories=(replace(group.trajectories[0], branches=(plain,)),))
    read = read_step_rollouts(write(group, tmp_path / "step-000001.parquet"))
    assert not any(span.images for span in read.groups[0].trajectories[0].spans)
