"""Time of the dashboard's queries on a large run: 10,000 steps, and 10 million tokens in one rollout file.

    python benchmarks/bench_dashboard.py [--steps 10000] [--tokens 10000000]

Each query is timed in the process that answers it, cold (files not read yet) and warm, with the bytes of its answer.
Seconds are CPU time, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from miles.core.events import BatchTaken
from miles.core.types import Author, Batch, Group, Prompt, Reward, Sample, Span, Status, Trajectory, Version
from miles.observe.dashboard.api import DashboardApi
from miles.observe.dashboard.run_index import RunIndex
from miles.observe.event_records import encode_line
from miles.observe.rollouts import step_path, write_step

TRAJECTORY_TOKENS = 10_000
GROUP_SIZE = 8
METRICS = 45


class Alphabet:
    """A tokenizer of single characters."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


def write_logs(folder: Path, steps: int) -> None:
    """Logs and a trace as a run of that many steps writes them."""
    rewards = np.linspace(0, 1, steps) + np.random.default_rng(0).normal(0, 0.05, steps)
    seconds = {"rollout": 2.0, "train": 1.5, "publish": 0.1, "step": 3.6, "train/optimize": 1.4, "train/pack": 0.05}
    with (folder / "metrics.jsonl").open("wb") as metrics, (folder / "timings.jsonl").open("wb") as timings:
        for step in range(1, steps + 1):
            values = {f"metric_{number}": float(step * number) / 7 for number in range(METRICS - 2)}
            values |= {"reward": float(rewards[step - 1]), "rollout_tokens": 1e5}
            metrics.write(encode_line(values | {"kind": "train", "step": step}))
            timings.write(encode_line({"kind": "train", "step": step, "seconds": seconds}))
    (folder / "trace").mkdir()
    with (folder / "trace" / "loop.json").open("w") as trace:
        trace.write("[\n")
        for step in range(steps):
            for name, start, length in (("rollout", 0.0, 2.0), ("train", 2.0, 1.5), ("publish", 3.5, 0.1)):
                span = {"name": f"{name} {step}", "ph": "X", "pid": 1, "tid": 1, "dur": length * 1e6}
                trace.write(json.dumps(span | {"ts": (3.6 * step + start) * 1e6}) + ",\n")


def write_rollout(folder: Path, tokens: int) -> None:
    """One step whose trajectories have that many tokens together."""
    (folder / "rollouts").mkdir()
    random = np.random.default_rng(0)
    groups: list[Group] = []
    samples: list[Sample] = []
    for number in range(max(1, tokens // TRAJECTORY_TOKENS // GROUP_SIZE)):
        trajectories = [_make_trajectory(random, index) for index in range(GROUP_SIZE)]
        prompt = Prompt(id=number, messages=[{"role": "user", "content": f"prompt {number}"}], label="42")
        groups.append(Group(prompt=prompt, trajectories=tuple(trajectories)))
        samples += [_make_sample(number, trajectory) for trajectory in trajectories]
    batch = Batch(step=1, samples=tuple(samples), num_groups=len(groups))
    taken = BatchTaken(step=1, tickets=tuple(range(len(groups))), batch=batch, groups=tuple(groups))
    write_step(step_path(folder / "rollouts", 1), taken)


def _make_trajectory(random: np.random.Generator, index: int) -> Trajectory:
    count = TRAJECTORY_TOKENS - 100
    asked = Span(author=Author.PROMPT, tokens=random.integers(0, 150_000, 100, dtype=np.int32))
    said = Span(
        author=Author.POLICY,
        tokens=random.integers(0, 150_000, count, dtype=np.int32),
        logprobs=-random.random(count, np.float32),
        version=Version(number=0),
    )
    return Trajectory(
        branches=((asked, said),),
        status=Status.COMPLETED,
        reward=Reward(value=float(random.random())),
        index=index,
        metadata={"text": "word " * 2000 + str(index)},
    )


def _make_sample(prompt_id: int, trajectory: Trajectory) -> Sample:
    asked, said = trajectory.branches[0]
    assert said.logprobs is not None
    mask = np.arange(TRAJECTORY_TOKENS) >= len(asked)
    return Sample(
        prompt_id=prompt_id,
        trajectory=trajectory.index,
        tokens=np.concatenate([asked.tokens, said.tokens]),
        mask=mask,
        logprobs=np.concatenate([np.zeros(len(asked), np.float32), said.logprobs]),
        advantages=mask.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def build(folder: Path) -> DashboardApi:
    index = RunIndex([folder])
    index.refresh()
    return DashboardApi(
        index, load_tokenizer=lambda run: Alphabet(), choose_tolerance=lambda run: 0.01, clock=time.time
    )


def measure(folder: Path, title: str, query: str, **params: object) -> None:
    """Print the CPU seconds of a query, cold and warm, and the size of its answer."""
    api = build(folder)
    words = {"run": ["run"]} | {key: [str(value)] for key, value in params.items()}
    seconds: list[float] = []
    size = 0
    for _ in range(3):
        start = time.process_time()
        size = len(json.dumps(api.query(query, words)))
        seconds.append(time.process_time() - start)
    print(f"| {title} | {seconds[0]:.2f} s | {1000 * min(seconds[1:]):.0f} ms | {size / 1024:.0f} KiB |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        (folder / "config.toml").write_text('[models]\nhf_checkpoint = "model"\n')
        write_logs(folder, options.steps)
        write_rollout(folder, options.tokens)
        size = (folder / "metrics.jsonl").stat().st_size / 2**20
        rollout = step_path(folder / "rollouts", 1).stat().st_size / 2**20
        print(f"{options.steps} steps ({size:.0f} MiB of metrics), {options.tokens} tokens ({rollout:.0f} MiB)\n")
        print("| query | first | again | answer |\n|---|--:|--:|--:|")
        measure(folder, "overview: verdict and checks", "overview")
        measure(folder, "a curve", "series", name="reward")
        measure(folder, "a smoothed curve", "series", name="reward", smooth=50)
        measure(folder, "new points since a step", "series", name="reward", since=options.steps - 5)
        measure(folder, "has anything changed", "state")
        measure(folder, "time of a step", "time")
        measure(folder, "timeline of the whole run", "timeline", start=0, end=10**9)
        measure(folder, "trajectories of a step, sorted", "trajectories", step=1, sort="reward", order="desc")
        measure(folder, "trajectories with a text", "trajectories", step=1, q="word 7")
        measure(folder, "a conversation of 10,000 tokens", "trajectory", step=1, index=3)
        measure(folder, "2,000 tokens with their numbers", "tokens", step=1, index=3, first=4000)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\npeak memory {peak:.1f} GiB, with what the files were made from")


if __name__ == "__main__":
    main()
