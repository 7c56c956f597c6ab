"""Plot learning curves: one panel for each example, one line for each run, and held-out rewards.

python examples/shared/learning_curves.py PICTURE.png TITLE RUN [RUN ...] [-- TITLE RUN [RUN ...]]

A line is the mean reward of a step's trajectories. A dot is the reward on held-out rows, a cross that on the same rows
with images swapped, at each step that was followed by an evaluation.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from training_runs import measured

COLOURS = ("#1f6fb4", "#d9822b", "#3b8f4f", "#8a4fa3")
MARKS = {"heldout": "o", "swapped": "x"}
LABELS = {"heldout": "held-out", "swapped": "images swapped"}


def plot_runs(axes: Axes, title: str, runs: list[Path]) -> None:
    """One panel."""
    for number, (run, colour) in enumerate(zip(runs, COLOURS[: len(runs)], strict=True)):
        rewards = [row["reward"] for row in measured(run, "train")]
        axes.plot(range(1, len(rewards) + 1), rewards, color=colour, linewidth=1.2, label=f"seed {number}")
        for name, mark in MARKS.items():
            scores = {row["step"]: row[f"eval/{name}/reward"] for row in measured(run, "eval")}
            axes.plot(list(scores), list(scores.values()), mark, color=colour, markersize=6, clip_on=False)
    axes.set(title=title, xlabel="step of GRPO", ylabel="reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    for name, mark in MARKS.items():
        axes.plot([], [], mark, color="#555555", label=LABELS[name])
    axes.legend(loc="lower center", frameon=False, ncols=2, fontsize="small")


def main() -> None:
    panels = [list(words) for is_end, words in groupby(sys.argv[2:], lambda word: word == "--") if not is_end]
    if not panels or min(map(len, panels)) < 2:
        sys.exit(f"usage: python {sys.argv[0]} PICTURE.png TITLE RUN [RUN ...] [-- TITLE RUN [RUN ...]]")
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 3.8), squeeze=False)
    for each, (title, *runs) in zip(axes[0], panels, strict=True):
        plot_runs(each, title, [Path(run) for run in runs])
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
