"""Demonstrations and pairs on images: the tokens of a rollout, with the images where the engine would have them."""

import asyncio

import pytest
from tests.models.small_vision import draw_png, write_processor

from miles.core.errors import DataError
from miles.core.media_store import MediaStore
from miles.core.types import Author, Prompt
from miles.models.processor import load_processor
from miles.rollout.offline.preference import PREFERENCE, PreferenceRollout
from miles.rollout.offline.sft import SFTRollout


@pytest.fixture
def processor(tmp_path):
    return load_processor(write_processor(tmp_path, "qwen3_vl"), media=MediaStore())


def user(processor, *seeds, text="?"):
    parts = [{"type": "image", "image": processor.media.put(draw_png(seed, 40 + 8 * seed, 32))} for seed in seeds]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def sft(processor, kind="all"):
    return SFTRollout(processor, eos_token_ids=(processor.eos_token_id,), chat=True, loss_mask_type=kind)


def test_the_prompt_is_what_a_rollout_renders_and_the_images_are_placed(processor):
    messages = (user(processor, 0, 1), {"role": "assistant", "content": "a"}, user(processor, 2))
    prompt = Prompt(id=1, messages=messages, label="b")
    (trajectory,) = asyncio.run(sft(processor).produce(prompt)).trajectories
    first, one, second, two = trajectory.branches[0]
    rendered, images = processor.render(messages[:1], add_generation_prompt=True)
    assert first.tokens.tolist() == rendered.tolist() and first.images == images
    whole, all_images = processor.render(messages, add_generation_prompt=True)
    joined = [*first.tokens, *one.tokens, *second.tokens]
    assert joined == whole.tolist()
    (placed,) = second.images
    assert placed.shift(len(first) + len(one)) == all_images[2]
    assert processor.decode(two.tokens.tolist()) == "b<|im_end|>"


def test_each_turn_has_the_images_before_it(processor):
    reply = {"role": "assistant", "content": "a"}
    prompt = Prompt(id=1, messages=(user(processor, 0), reply, user(processor, 1), reply))
    (trajectory,) = asyncio.run(sft(processor, "each").produce(prompt)).trajectories
    assert [[len(span.images) for span in branch] for branch in trajectory.branches] == [[1, 0], [2, 0]]


def test_both_replies_of_a_pair_see_the_image(processor):
    pair = {"chosen": {"role": "assistant", "content": "a"}, "rejected": {"role": "assistant", "content": "b"}}
    prompt = Prompt(id=1, messages=(user(processor, 0),), metadata={PREFERENCE: pair})
    group = asyncio.run(PreferenceRollout(sft(processor, "last"), chat=True).produce(prompt))
    chosen, rejected = (trajectory.branches[0][0] for trajectory in group.trajectories)
    assert chosen.images == rejected.images != () and chosen.author is Author.PROMPT


def test_an_image_in_a_trained_message_is_refused(processor):
    reply = {**user(processor, 0), "role": "assistant"}
    with pytest.raises(DataError, match="Prompt 1: an assistant message that is trained on has an image"):
        sft(processor).branches(Prompt(id=1, messages=({"role": "user", "content": "draw"}, reply)))
