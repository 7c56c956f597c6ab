"""A counting task drawn with Pillow: an image of one to five discs, and the question how many there are.

Two in five demonstrations give a wrong number: from them supervised fine-tuning learns to see, and to be right less
than half the time. That a right number is worth more is for GRPO to find out.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
from model import SIDE, write_checkpoint
from training_runs import write_rows

COLOUR = (40, 60, 220)
MOST = 5
CELLS = 3
"""Discs are drawn in different cells of a grid of CELLS x CELLS, each somewhere in its cell; no two touch."""
QUESTION = "how many"
WRONG = 0.4
"""The share of demonstrations with a wrong number."""


def draw_discs(number: int, chance: random.Random) -> Image.Image:
    """An image with that many discs of several sizes."""
    image = Image.new("RGB", (SIDE, SIDE), (235, 235, 235))
    pen = ImageDraw.Draw(image)
    size = SIDE // CELLS
    for cell in chance.sample(range(CELLS * CELLS), number):
        radius = chance.randint(5, 6)
        x, y = (place * size + chance.randint(radius + 1, size - radius - 1) for place in divmod(cell, CELLS))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOUR)
    return image


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 2048, questions: int = 1024) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, ``swapped.jsonl``, their images and a random model.

    ``swapped.jsonl`` has the rows of ``heldout.jsonl``, each with the image of another row.
    """
    chance = random.Random(f"discs {seed}")
    shown = _draw_rows(folder, "warmup", demonstrations, chance)
    for row in shown:
        wrong = [number for number in range(1, MOST + 1) if str(number) != row["label"]]
        said = row["label"] if chance.random() >= WRONG else str(chance.choice(wrong))
        row["messages"] = [{"role": "user", "content": row.pop("input")}, {"role": "assistant", "content": said}]
    write_rows(folder / "warmup.jsonl", shown)
    write_rows(folder / "train.jsonl", _draw_rows(folder, "train", questions, chance))
    heldout = _draw_rows(folder, "heldout", 128, chance)
    write_rows(folder / "heldout.jsonl", heldout)
    write_rows(folder / "swapped.jsonl", swap_images(heldout))
    write_checkpoint(folder, (QUESTION,), seed=seed)


def swap_images(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Each row with the image of the next, whose label is independent of its own."""
    return [{**row, "images": other["images"]} for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)]


def _draw_rows(folder: Path, name: str, count: int, chance: random.Random) -> list[dict[str, object]]:
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for row in range(count):
        number = chance.randint(1, MOST)
        draw_discs(number, chance).save(folder / name / f"{row}.png")
        rows.append({"input": f"<image>{QUESTION}", "images": f"{name}/{row}.png", "label": str(number)})
    return rows
