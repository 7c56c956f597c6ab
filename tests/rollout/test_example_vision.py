"""The vision examples: images show what labels say, and a small model learns to look at them."""

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

EXAMPLE = Path(__file__).parents[2] / "examples" / "vision_counting"


def load_module(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(EXAMPLE))
from discs import COLOUR, MOST, draw_discs, write_start  # noqa: E402

run = load_module("vision_counting_run", EXAMPLE / "run.py")
swapped = load_module("vision_counting_swapped", EXAMPLE / "swapped.py")


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    done = miles("train", *run.grpo_flags(start, run.newest(warmup), grpo, steps=40), patience=900)
    assert done.returncode == 0, done.stderr
    before, after = run.measured(grpo, "eval")
    reported = {name: (before[f"eval/{name}/reward"], after[f"eval/{name}/reward"]) for name in ("heldout", "swapped")}
    assert reported["heldout"][0] < 0.7 and reported["heldout"][1] > reported["heldout"][0] + 0.2, reported
    assert max(reported["swapped"]) < 0.35, reported  # one in five by chance
    assert max(row["parity_mean_abs"] for row in run.measured(grpo, "train")) < 1e-5
