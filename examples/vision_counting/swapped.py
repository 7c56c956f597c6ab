"""Evaluate a trained run with its held-out images, and with images swapped between rows: how much is seen?

python examples/vision_counting/swapped.py RUN HELDOUT [SHUFFLES]

RUN is the folder of a run, HELDOUT the JSONL file of its held-out rows, with a column ``images``. Labels and questions
stay with their rows; the images are shuffled among them, each time in another way.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path


def write_shuffles(heldout: Path, count: int) -> list[Path]:
    """Copies of a file of rows, with images in other orders; beside it, as paths of images are relative."""
    rows = [json.loads(line) for line in heldout.read_text().splitlines()]
    paths = [heldout.with_name(f"{heldout.stem}_shuffled{number}.jsonl") for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        images = [row["images"] for row in rows]
        random.Random(f"shuffle {number}").shuffle(images)
        shuffled = [{**row, "images": image} for row, image in zip(rows, images, strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in shuffled))
    return paths


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(f"usage: python {sys.argv[0]} RUN HELDOUT [SHUFFLES]")
    run, heldout = Path(sys.argv[1]), Path(sys.argv[2])
    paths = [heldout, *write_shuffles(heldout, int(sys.argv[3]) if len(sys.argv) > 3 else 3)]
    sets = [value for path in paths for value in (path.stem, str(path))]
    evaluate = [sys.executable, "-m", "miles.launch.main", "eval", str(run), "--eval-prompt-data", *sets]
    subprocess.run(evaluate, check=True)


if __name__ == "__main__":
    main()
