"""The vision examples: images show what labels say, and a small model learns to look at them."""

import asyncio
import io
import json
import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from tests.launch.small_run import miles
from tests.rollout.generate.scripted_engine import Scripted, call

from miles.core.media_store import MediaStore
from miles.core.protocols import SamplingParams
from miles.core.types import Prompt, Status
from miles.models.processor import load_processor
from miles.rollout.generate.multi_turn import MultiTurn
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.tools.env_registry import EnvironmentFactory
from miles.rollout.tools.tool import ToolLimits
from miles.rollout.tools.toolbox import ToolRegistry, ToolResources

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_module(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path[:0] = [str(EXAMPLES / name) for name in ("vision_counting", "vision_zoom", "shared")]
import stripes  # noqa: E402
from discs import COLOUR, MOST, draw_discs, write_start  # noqa: E402
from training_runs import measured, newest  # noqa: E402

run = load_module("vision_counting_run", EXAMPLES / "vision_counting" / "run.py")
swapped = load_module("vision_counting_swapped", EXAMPLES / "vision_counting" / "swapped.py")
zoom = load_module("vision_zoom_run", EXAMPLES / "vision_zoom" / "run.py")


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def to_png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()


def count_regions(image: Image.Image, colour: tuple[int, int, int]) -> int:
    """Connected regions of a colour, diagonal neighbours included."""
    left = set(zip(*np.nonzero((np.asarray(image) == colour).all(-1)), strict=True))
    regions = 0
    while left:
        regions += 1
        edge = [left.pop()]
        while edge:
            y, x = edge.pop()
            near = left & {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)}
            left -= near
            edge += near
    return regions


def test_an_image_has_as_many_discs_as_asked_for_and_none_touch():
    for number in range(1, MOST + 1):
        for seed in range(20):
            assert count_regions(draw_discs(number, random.Random(seed)), COLOUR) == number


def test_rows_have_the_image_of_their_label_and_swapped_rows_that_of_another(tmp_path):
    write_start(tmp_path, demonstrations=100, questions=4)
    heldout, other = (read_rows(tmp_path / f"{name}.jsonl") for name in ("heldout", "swapped"))
    counted = {row["images"]: count_regions(Image.open(tmp_path / row["images"]), COLOUR) for row in heldout}
    assert [str(counted[row["images"]]) for row in heldout] == [row["label"] for row in heldout]
    assert [row["label"] for row in other] == [row["label"] for row in heldout]
    assert all(a["images"] != b["images"] for a, b in zip(heldout, other, strict=True))
    (shuffled,) = swapped.write_shuffles(tmp_path / "heldout.jsonl", 1)
    rows = read_rows(shuffled)
    assert sorted(row["images"] for row in rows) == sorted(counted) and rows != heldout
    right = sum(str(counted[row["images"]]) == row["label"] for row in rows) / len(rows)
    assert right < 0.35  # one in five by chance
    shown = read_rows(tmp_path / "warmup.jsonl")
    told = [row["messages"][-1]["content"] == row["label"] for row in shown]
    assert 0.4 < np.mean(told) < 0.8


@pytest.mark.slow
def test_a_small_model_learns_to_count_and_is_at_chance_with_other_images(tmp_path):
    start, warmup, grpo = tmp_path / "start", tmp_path / "warmup", tmp_path / "grpo"
    write_start(start)
    done = miles("train", *run.warmup_flags(start, warmup), patience=900)
    assert done.returncode == 0, done.stderr
    done = miles("train", *run.grpo_flags(start, newest(warmup), grpo, steps=40), patience=900)
    assert done.returncode == 0, done.stderr
    before, after = measured(grpo, "eval")
    reported = {name: (before[f"eval/{name}/reward"], after[f"eval/{name}/reward"]) for name in ("heldout", "swapped")}
    assert reported["heldout"][0] < 0.7 and reported["heldout"][1] > reported["heldout"][0] + 0.2, reported
    assert max(reported["swapped"]) < 0.35, reported  # one in five by chance
    assert max(row["parity_mean_abs"] for row in measured(grpo, "train")) < 1e-5


def view(image: Image.Image) -> np.ndarray:
    """What the model sees of an image: 48 x 48 pixels."""
    return np.asarray(image.convert("RGB").resize((48, 48), Image.Resampling.BICUBIC))[..., 0].astype(int)


def test_stripes_are_seen_in_the_enlarged_view_of_their_place_only():
    for seed, place in enumerate(stripes.PLACES):
        images = [stripes.draw_stripes(name, place, random.Random(seed)) for name in stripes.DIRECTIONS]
        first = np.stack([view(image) for image in images])
        assert np.ptp(first, axis=0).max() <= 2  # of 255: the same grey square for every direction
        assert np.ptp(first[0]) > 100
        for elsewhere in set(stripes.PLACES) - {place}:
            assert all(np.ptp(view(stripes.enlarge(image, elsewhere))) == 0 for image in images)
        changes = []
        for image in images:
            seen = view(stripes.enlarge(image, place))
            shifts = ((0, 1), (1, 0), (1, -1), (1, 1))  # along rows, columns, rising and falling stripes
            changes.append([np.abs(seen - np.roll(seen, shift, (0, 1)))[2:-2, 2:-2].mean() for shift in shifts])
        assert np.argmin(changes, axis=1).tolist() == [0, 1, 2, 3]


def test_rows_of_the_zoom_example_differ_in_image_or_tool(tmp_path):
    stripes.write_start(tmp_path, demonstrations=20, questions=4)
    heldout, other, bare = (read_rows(tmp_path / f"{name}.jsonl") for name in zoom.EVALUATED)
    assert [row["label"] for row in other] == [row["label"] for row in heldout]
    assert all(a["images"] != b["images"] for a, b in zip(heldout, other, strict=True))
    assert bare == [{**row, "metadata": {"tools": []}} for row in heldout]
    roles = [tuple(message["role"] for message in row["messages"]) for row in read_rows(tmp_path / "warmup.jsonl")]
    answered = ("user", "assistant")
    looked = ("system", *answered, "tool", "assistant")
    assert [roles.count(each) for each in (looked, ("system", *answered), answered)] == [12, 6, 2]


def test_a_conversation_has_the_tokens_and_pixels_of_a_demonstration(tmp_path):
    """Whoever calls the tool as the demonstrations do sees what they show."""
    stripes.write_start(tmp_path / "start", demonstrations=1, questions=1)
    tokenizer = load_processor(tmp_path / "start", media=MediaStore(tmp_path / "media"))
    place = (0.3, 0.7)
    image = stripes.draw_stripes("rising", place, random.Random(0))
    shown = stripes.demonstrate("rising", place)
    references = [tokenizer.media.put(to_png(each)) for each in (image, stripes.enlarge(image, place))]
    for message, reference in zip((shown[1], shown[3]), references, strict=True):
        next(part for part in message["content"] if part["type"] == "image")["image"] = reference
    factory = EnvironmentFactory(ToolRegistry(ToolResources(media=tokenizer.media), ["zoom"]), ToolLimits())
    generate = MultiTurn(build_renderer(tokenizer), factory)
    engine = Scripted(tokenizer, [call("zoom", x=place[0], y=place[1], factor=stripes.FACTOR), "rising"])
    prompt = Prompt(id=0, messages=(shown[1],))
    trajectory = asyncio.run(generate(prompt, engine, SamplingParams(max_new_tokens=64)))
    assert (trajectory.status, trajectory.metadata["text"]) == (Status.COMPLETED, "rising")
    tokens = [token for span in trajectory.spans for token in span.tokens.tolist()]
    expected, images = tokenizer.render(shown)
    assert list(expected) == [*tokens, *tokenizer.encode("\n")]  # which the template writes behind a last turn
    assert tokenizer.encode("?")[0] not in expected  # which what no token stands for is read as
    seen = [placed.image.digest for span in trajectory.spans for placed in span.images]
    assert seen == [placed.image.digest for placed in images] and len(set(seen)) == 2


@pytest.mark.slow
def test_a_small_model_learns_to_zoom_and_is_at_chance_without_its_image_or_the_tool(tmp_path):
    start, warmup, grpo = tmp_path / "start", tmp_path / "warmup", tmp_path / "grpo"
    stripes.write_start(start)
    done = miles("train", *zoom.warmup_flags(start, warmup), patience=900)
    assert done.returncode == 0, done.stderr
    done = miles("train", *zoom.grpo_flags(start, newest(warmup), grpo), patience=900)
    assert done.returncode == 0, done.stderr
    before, after = measured(grpo, "eval")
    reported = {name: (before[f"eval/{name}/reward"], after[f"eval/{name}/reward"]) for name in zoom.EVALUATED}
    assert reported["heldout"][0] < 0.7 and reported["heldout"][1] > reported["heldout"][0] + 0.2, reported
    assert max(*reported["swapped"], *reported["without_tool"]) < 0.4, reported  # one in four by chance
    assert max(row["parity_mean_abs"] for row in measured(grpo, "train")) < 1e-5
