"""Example run directories: written by the real sinks from example events, or with many steps in the real format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tests.observe.example_events import samples, story

from miles.core.events import BatchTaken, RunEnded
from miles.core.token_fields import ROUTED_EXPERTS
from miles.core.types import Author, Batch, Group, Prompt, Reward, Span, Status, TokenStats, Trajectory, Version
from miles.observe.dashboard.api import DashboardApi
from miles.observe.dashboard.run_index import RunIndex
from miles.observe.event_records import encode_line
from miles.observe.log import RunLogs
from miles.observe.rollouts import RolloutDump, step_path, write_step, write_token_stats
from miles.observe.trace import LoopTrace

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'> \u202e javascript:alert(1)"


class Alphabet:
    """A tokenizer of single characters."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens)


def write_run(folder: Path, steps: int = 4, *, is_finished: bool = True, options: str = "lr = 0.001") -> Path:
    """A run as the loop writes it: logs, rollouts, trace and config."""
    write_config(folder, options)
    ticks = iter(range(10**6))
    sinks = [LoopTrace(folder / "trace", clock=lambda: float(next(ticks))), RolloutDump(folder / "rollouts")]
    with RunLogs(folder, resume_at=None, strict=True, clock=lambda: 1000.0 + next(ticks)) as logs:
        for event in story(steps):
            if isinstance(event, RunEnded) and not is_finished:
                break
            logs(event)
            for sink in sinks:
                sink(event)
        for sink in sinks:
            sink.close()
    return folder


def write_config(folder: Path, options: str = "lr = 0.001") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(f'[models]\nhf_checkpoint = "model"\n\n[train]\n{options}\n')


def append_steps(folder: Path, first: int, last: int, **columns: float) -> None:
    """Append steps to the logs of a run, each ``reward`` a tenth of its number unless it is given."""
    with (folder / "metrics.jsonl").open("ab") as metrics, (folder / "timings.jsonl").open("ab") as timings:
        for step in range(first, last + 1):
            values = {"reward": step / 10, "rollout_tokens": 100.0} | columns
            metrics.write(encode_line(values | {"kind": "train", "step": step}))
            seconds = {"rollout": 0.5, "train": 0.4, "publish": 0.1, "step": 1.0}
            timings.write(encode_line({"kind": "train", "step": step, "seconds": seconds}))


def write_long_run(folder: Path, steps: int, metrics: int = 40) -> Path:
    """A run of many steps whose reward rises from 0 to 1 with noise; ``spike`` is 9 at one step only."""
    write_config(folder)
    random = np.random.default_rng(0)
    rewards = np.linspace(0, 1, steps) + random.normal(0, 0.05, steps)
    with (folder / "metrics.jsonl").open("wb") as log, (folder / "timings.jsonl").open("wb") as timings:
        for step in range(1, steps + 1):
            values = {f"metric_{number}": float(number * step) for number in range(metrics)}
            values |= {"reward": float(rewards[step - 1]), "rollout_tokens": 1000.0, "grad_norm": 1.0}
            values |= {"spike": 9.0 if step == steps // 3 else 0.0}
            log.write(encode_line(values | {"kind": "train", "step": step}))
            seconds = {"rollout": 2.0, "train": 1.5, "publish": 0.1, "step": 3.6}
            timings.write(encode_line({"kind": "train", "step": step, "seconds": seconds}))
    (folder / "logs").mkdir()
    started = {"event": "RunStarted", "step": 0, "steps": steps, "time": 1.0}
    (folder / "logs" / "sessions.jsonl").write_bytes(encode_line(started))
    return folder


def write_rollouts(folder: Path, step: int, groups: Sequence[Group]) -> None:
    """Write a rollout file of these groups."""
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    rows = tuple(row for one in groups for row in samples(one))
    batch = Batch(step=step, samples=rows, num_groups=len(groups))
    event = BatchTaken(step=step, tickets=tuple(range(len(groups))), batch=batch, groups=tuple(groups))
    write_step(step_path(folder / "rollouts", step), event)
    spans = [span for one in groups for trajectory in one.trajectories for span in trajectory.spans]
    logprobs = np.concatenate([s.logprobs for s in spans if s.logprobs is not None]) - np.float32(0.25)
    stats = TokenStats(
        sample_indices=np.arange(len(rows), dtype=np.int32),
        counts=np.array([row.mask.sum() for row in rows], np.int32),
        logprobs=logprobs,
        entropies=-logprobs,
    )
    write_token_stats(folder / "rollouts" / "trainer", event, stats)


def text_group(prompt: str, responses: Sequence[tuple[str, float]], *, prompt_id: int = 0, **metadata: object) -> Group:
    """A group whose tokens are characters (see Alphabet)."""
    return Group(
        prompt=Prompt(id=prompt_id, messages=[{"role": "user", "content": prompt}], label="42"),
        trajectories=tuple(_text_trajectories(prompt, responses, metadata)),
    )


def _text_trajectories(prompt: str, responses: Sequence[tuple[str, float]], metadata: dict) -> Iterator[Trajectory]:
    for index, (text, reward) in enumerate(responses):
        tokens = np.array([ord(char) for char in text], np.int32)
        asked = Span(author=Author.PROMPT, tokens=np.array([ord(char) for char in prompt], np.int32))
        logprobs = np.linspace(-0.1, -2.0, len(tokens)).astype(np.float32)
        extras = {ROUTED_EXPERTS: np.stack([tokens % 5, tokens % 3], 1).astype(np.uint8)[:, :, None]}
        said = Span(author=Author.POLICY, tokens=tokens, logprobs=logprobs, version=Version(number=3), extras=extras)
        yield Trajectory(
            branches=((asked, said),),
            status=Status.COMPLETED if index % 2 == 0 else Status.TRUNCATED,
            reward=Reward(value=reward),
            index=index,
            metadata={"text": text, **metadata},
            times={"started": 1000.0, "generate": float(len(text)), "grade": 0.5 * index},
        )


def build_example_api(*roots: Path, docs: Path | None = None, now: float = 2000.0) -> DashboardApi:
    index = RunIndex(roots)
    index.refresh()
    return DashboardApi(
        index,
        load_tokenizer=lambda run: Alphabet(),
        choose_tolerance=lambda run: 0.01,
        clock=lambda: now,
        docs=docs,
    )
