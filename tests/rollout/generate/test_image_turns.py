"""Multi-turn rollouts with images: tools that return them, and single turns that are resumed."""

import asyncio
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tests.models.small_vision import draw_image, draw_png, write_processor
from tests.rollout.generate.scripted_engine import Scripted, call

from miles.core.media_store import MediaStore
from miles.core.protocols import SamplingParams
from miles.core.types import Author, Prompt, Status
from miles.models.processor import load_processor
from miles.rollout.generate.multi_turn import MultiTurn
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.prompt_renderer import PromptRenderer
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.tools.env_registry import EnvironmentFactory
from miles.rollout.tools.tool import Tool, ToolLimits
from miles.rollout.tools.toolbox import ToolRegistry, ToolResources

SAMPLING = SamplingParams(max_new_tokens=2000)


class Seeing(Scripted):
    """A scripted engine that also records the images it is given."""

    def __init__(self, tokenizer, script) -> None:
        super().__init__(tokenizer, script)
        self.seen = []

    async def generate(self, tokens, sampling, images=()):
        self.seen.append(images)
        for placed in images:
            assert set(tokens[placed.start : placed.end].tolist()) == {self._tokenizer.image_token_id}
        return await super().generate(tokens, sampling, images)


@pytest.fixture
def processor(tmp_path):
    return load_processor(write_processor(tmp_path / "model", "qwen3_vl"), media=MediaStore(tmp_path / "media"))


@pytest.fixture
def prompt(processor):
    part = {"type": "image", "image": processor.media.put(draw_png(0, 64, 64))}
    return Prompt(id=1, messages=({"role": "user", "content": [part, {"type": "text", "text": "Which letter?"}]},))


def play(processor, prompt, script, *names, **custom):
    engine = Seeing(processor, script)
    resources = ToolResources(media=processor.media, custom=custom)
    factory = EnvironmentFactory(ToolRegistry(resources, names), ToolLimits())
    generate = MultiTurn(build_renderer(processor), factory, audit=True)
    return asyncio.run(generate(prompt, engine, SAMPLING)), engine


def decode(processor, source):
    return Image.open(io.BytesIO(processor.media.get(f"sha256:{source}")))


def test_a_crop_and_a_zoom_are_seen_in_the_next_turns(processor, prompt, tmp_path):
    script = [call("crop", left=0, top=0, right=0.5, bottom=0.25), call("zoom", image=1, x=1, y=1, factor=4), "B"]
    trajectory, engine = play(processor, prompt, script, "crop", "zoom")
    assert (trajectory.status, trajectory.metadata["tool_failures"]) == (Status.COMPLETED, 0)
    assert [len(images) for images in engine.seen] == [1, 2, 3]
    crop, zoom = (decode(processor, placed.image.source) for placed in engine.seen[2][1:])
    whole = draw_image(0, 64, 64)
    assert crop.size == (32, 16) and crop.tobytes() == whole.crop((0, 0, 32, 16)).tobytes()
    assert zoom.size == (64, 64)
    (branch,) = trajectory.branches
    assert [len(span.images) for span in branch if span.author is Author.ENV] == [1, 1]
    tokens = np.concatenate([span.tokens for span in branch]).tolist()
    assert tokens[: len(engine.asked[2][0])] == engine.asked[2][0]
    assert "Image 2:" in processor.decode(tokens) and not trajectory.metadata["session_mismatch"]
    assert len(list((tmp_path / "media").iterdir())) == 3
    json.dumps(trajectory.metadata["messages"])  # references, not pixels


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"image": 7, "x": 0, "y": 0}, "there is no image 7, only 1"),
        ({"x": 0, "y": 0, "factor": 99}, "factor must be from 1 to 32"),
        ({"x": 0}, "the argument y is missing"),
    ],
)
def test_wrong_arguments_are_reported_to_the_policy(arguments, reason, processor, prompt):
    trajectory, _ = play(processor, prompt, [call("zoom", **arguments), "B"], "zoom")
    assert reason in trajectory.metadata["messages"][2]["content"] and trajectory.metadata["tool_failures"] == 1


def test_a_users_tool_may_return_an_image_or_parts(processor, prompt):
    async def plot(arguments):
        return draw_image(5)

    async def both(arguments):
        return [{"type": "text", "text": "two:"}, {"type": "image", "image": draw_png(6)}]

    empty = {"type": "object", "properties": {}}
    tools = {fn.__name__: Tool(name=fn.__name__, description="", parameters=empty, call=fn) for fn in (plot, both)}
    trajectory, engine = play(processor, prompt, [call("plot"), call("both"), "B"], "plot", "both", **tools)
    assert trajectory.status is Status.COMPLETED and len(engine.seen[-1]) == 3
    assert "two:" in processor.decode(engine.asked[-1][0])


def test_a_tools_bad_image_fails_its_trajectory_with_the_reason(processor, prompt):
    async def plot(arguments):
        return [{"type": "image", "image": b"no image"}]

    tool = Tool(name="plot", description="", parameters={"type": "object", "properties": {}}, call=plot)
    trajectory, _ = play(processor, prompt, [call("plot"), "B"], "plot", plot=tool)
    assert trajectory.status is Status.FAILED and "no image of a known format" in trajectory.metadata["failure"]


def test_an_interrupted_single_turn_resumes_with_its_images(processor, prompt):
    render = PromptRenderer(processor, chat=True)
    generate = SingleTurn(render, processor.text, load_images=render.load_images)
    engine = Seeing(processor, ["a long reply"])
    engine.aborts = True
    partial = asyncio.run(generate(prompt, engine, SAMPLING))
    engine.aborts = False
    whole = asyncio.run(generate.resume(prompt, partial, engine, replace(SAMPLING, seed=3)))
    assert engine.seen[0] == engine.seen[1] != ()
    assert whole.branches[0][0].images == engine.seen[0]
