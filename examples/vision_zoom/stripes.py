"""A task that needs a second look, drawn with Pillow: stripes too fine to be seen until their place is enlarged.

A square stands in one of four places of an image of 192 x 192 pixels, filled with stripes of four pixels in one of four
directions. The model's processor shrinks the image to 48 x 48 pixels: the square can be seen, and is equally grey for
all directions. The tool ``zoom`` shows the stripes, if it is called for the place of the square.

Of ten demonstrations five look at the square, of which two name what they see; one looks elsewhere, three do not look,
and one is not offered the tool. All but those two name any direction.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parents[1] / "vision_counting"))
from discs import swap_images
from model import write_checkpoint
from training_runs import write_rows

SIDE = 192
SQUARE = 64
FACTOR = 8
"""``zoom`` shows an eighth of the image's width: 24 pixels, which are six stripes."""
PERIOD = 4
PLACES = [(x, y) for x in (0.3, 0.7) for y in (0.3, 0.7)]
SHIFT = 8
"""How far the middle of a square may be from its place, in pixels; what ``zoom`` shows is then still in the square."""
DIRECTIONS = {"rows": (0, 1), "columns": (1, 0), "rising": (1, 1), "falling": (1, -1)}
"""The direction in which colours change: what a step right and a step down add to the phase."""
QUESTION = "which stripes"
CALL_PIECES = ("0.3", "0.7", f', "factor": {FACTOR}}}}}\n</tool_call>')
"""Tokens of a call: it is six tokens long."""
BACKGROUND, GREY, CONTRAST = 235, 110, 90


def draw_stripes(direction: str, place: tuple[float, float], chance: random.Random) -> Image.Image:
    """An image with a square of stripes near a place. Stripes fade at its edges, where they would show otherwise."""
    pixels = np.full((SIDE, SIDE), BACKGROUND, np.uint8)
    x, y = (round(SIDE * part) + chance.randint(-SHIFT, SHIFT) - SQUARE // 2 for part in place)
    across, down = DIRECTIONS[direction]
    right, below = np.meshgrid(np.arange(SQUARE), np.arange(SQUARE))
    wave = np.sin(2 * np.pi * ((across * right + down * below) / PERIOD + chance.random()))
    fade = np.minimum(1, np.minimum(np.arange(SQUARE), np.arange(SQUARE)[::-1]) / 12)
    square = GREY + CONTRAST * wave * fade * fade[:, None]
    pixels[y : y + SQUARE, x : x + SQUARE] = square.round().astype(np.uint8)
    return Image.fromarray(pixels)


def enlarge(image: Image.Image, place: tuple[float, float]) -> Image.Image:
    """What the tool ``zoom`` shows of a place."""
    part = SIDE // FACTOR
    x, y = (round(SIDE * (each - 0.5 / FACTOR)) for each in place)
    return image.crop((x, y, x + part, y + part)).resize(image.size)


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 2048, questions: int = 640) -> None:
    """``warmup.jsonl``, ``train.jsonl``, held-out rows, their images and a random model.

    Of ``heldout.jsonl``, ``swapped.jsonl`` has the rows each with the image of another, and ``without_tool.jsonl`` the
    rows without the tool.
    """
    chance = random.Random(f"stripes {seed}")
    write_rows(folder / "warmup.jsonl", [_write_demonstration(folder, row, chance) for row in range(demonstrations)])
    train = _draw_rows(folder, "train", questions, chance)
    heldout = _draw_rows(folder, "heldout", 96, chance)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "heldout.jsonl", heldout)
    write_rows(folder / "swapped.jsonl", swap_images(heldout))
    write_rows(folder / "without_tool.jsonl", [{**row, "metadata": {"tools": []}} for row in heldout])
    write_checkpoint(folder, ("zoom", QUESTION, *DIRECTIONS, *CALL_PIECES), seed=seed, position_std=1.0)


def demonstrate(said: str, place: tuple[float, float] | None, *, offered: bool = True) -> list[dict[str, Any]]:
    """A conversation that looks at a place, or at none, and names a direction."""
    system = [{"role": "system", "content": "zoom"}] if offered else []  # as the template writes it of the tool itself
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    messages: list[dict[str, Any]] = [*system, question]
    if place is not None:
        arguments = {"x": place[0], "y": place[1], "factor": FACTOR}
        call = {"type": "function", "function": {"name": "zoom", "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "Image 2:"}, {"type": "image"}]},
        ]
    return [*messages, {"role": "assistant", "content": said}]


def _write_demonstration(folder: Path, row: int, chance: random.Random) -> dict[str, object]:
    direction, place = chance.choice(list(DIRECTIONS)), chance.choice(PLACES)
    image = draw_stripes(direction, place, chance)
    kind = row % 10
    looked = place if kind < 5 else chance.choice([each for each in PLACES if each != place]) if kind == 5 else None
    said = direction if kind < 2 else chance.choice(list(DIRECTIONS))
    files = {f"warmup/{row}.png": image}
    if looked is not None:
        files[f"warmup/{row}_zoom.png"] = enlarge(image, looked)
    _save(folder, files)
    return {"messages": demonstrate(said, looked, offered=kind < 9), "images": list(files)}


def _draw_rows(folder: Path, name: str, count: int, chance: random.Random) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for row in range(count):
        direction, path = chance.choice(list(DIRECTIONS)), f"{name}/{row}.png"
        _save(folder, {path: draw_stripes(direction, chance.choice(PLACES), chance)})
        rows.append({"input": f"<image>{QUESTION}", "images": path, "label": direction})
    return rows


def _save(folder: Path, files: Mapping[str, Image.Image]) -> None:
    for path, image in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / path)
