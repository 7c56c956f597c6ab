"""Where the time of a GRPO step goes: ``miles train`` on one GPU, random weights of a published shape.

    PYTHONPATH=src:. python benchmarks/bench_grpo_step_gpu.py TOKENIZER [--model Qwen3-0.6B] [--prompt-len 256]
        [--response-len 256] [--steps 8] [-- FLAGS OF MILES TRAIN]

32 prompts x 8 responses, one update, in step, everything on that is on by default: parity check, digests, rollout
files, metrics, trace. TOKENIZER is a folder with a tokenizer of fewer tokens than the model has; rewards are random.
Prints the seconds from the command to the end of the first step by phase (``start/...`` of ``timings.jsonl``), and the
median of the steps from the third on by part, beside the least time that the device's peaks allow (``limit/...``).
The run is killed after its last step, since the checkpoint at the end of a run of 4B parameters takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.random_checkpoint import write_random_checkpoint

NUM_PROMPTS, NUM_SAMPLES = 32, 8
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
REWARD = "import random\n\n\nasync def score(args, sample):\n    return random.random()\n"


def write_prompts(tokenizer: Path, path: Path, length: int, count: int) -> None:
    """Rows of random words, each of exactly ``length`` tokens."""
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(str(tokenizer))
    words = [
        word for word in (read.decode([i]) for i in range(1000, 20_000)) if word.startswith(" ") and word[1:].isalpha()
    ]
    chance = random.Random(0)
    rows: list[str] = []
    while len(rows) < count:
        tokens = read("".join(chance.choices(words, k=length)), add_special_tokens=False)["input_ids"][:length]
        text = read.decode(tokens)
        if len(read(text, add_special_tokens=False)["input_ids"]) == length:
            rows.append(json.dumps({"input": text, "label": ""}))
    path.write_text("\n".join(rows) + "\n")


def run_steps(args: argparse.Namespace, root: Path) -> tuple[float, list[dict[str, float]]]:
    """Seconds until the first step was finished, and the timings of all steps."""
    write_random_checkpoint(args.model, root / "model")
    for name in TOKENIZER_FILES:
        if (args.tokenizer / name).exists():
            shutil.copy(args.tokenizer / name, root / "model")
    write_prompts(args.tokenizer, root / "prompts.jsonl", args.prompt_len, NUM_PROMPTS * (args.steps + 1))
    (root / "reward.py").write_text(REWARD)
    flags = {
        "--hf-checkpoint": root / "model",
        "--prompt-data": root / "prompts.jsonl",
        "--custom-rm-path": f"{root / 'reward.py'}:score",
        "--rollout-batch-size": NUM_PROMPTS,
        "--n-samples-per-prompt": NUM_SAMPLES,
        "--rollout-max-prompt-len": args.prompt_len,
        "--rollout-max-response-len": args.response_len,
        "--num-rollout": args.steps + 1,
        "--save-interval": 1000,
        "--save": root / "run",
        "--view": "plain",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    began, first, steps = time.monotonic(), 0.0, []
    command = [sys.executable, "-m", "miles.launch.main", "train", *words, *args.flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        for line in run.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("step 1/"):
                first = time.monotonic() - began
            steps = read_steps(root / "run" / "timings.jsonl")
            if len(steps) >= args.steps:
                os.killpg(run.pid, signal.SIGKILL)
                break
    assert len(steps) >= args.steps, f"miles train ended with {run.returncode} after {len(steps)} steps"
    return first, steps


def read_steps(timings: Path) -> list[dict[str, float]]:
    """Return the seconds by part of each step that has been written whole."""
    lines = timings.read_text().splitlines(keepends=True) if timings.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["seconds"] for row in rows if row["kind"] == "train"]


def show(first: float, steps: list[dict[str, float]]) -> None:
    later = steps[2:]
    print(f"first step after {first:.1f} s:")
    for name, value in steps[0].items():
        if name.startswith("start/"):
            print(f"  {name:44} {value:10.4f}")
    print(f"median of {len(later)} later steps:")
    for name in sorted(later[-1]):
        print(f"  {name:44} {statistics.median(step[name] for step in later if name in step):10.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Further flags of miles train follow --.",
    )
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--model", default="Qwen3-0.6B")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--response-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8, help="at least 3")
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:own])
    args.flags = words[own + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        show(*run_steps(args, Path(folder)))


if __name__ == "__main__":
    main()
