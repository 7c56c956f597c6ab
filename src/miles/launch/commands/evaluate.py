"""``miles eval``: score a checkpoint on held-out prompts, without training."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from miles.cluster.hub_client import get_model_name
from miles.config.provenance import flatten_values
from miles.config.schema import get_options
from miles.core.types import UNSCORED, Group
from miles.kernels.numerics import configure_cublas
from miles.launch.build.generation import build_generation, build_multi_agent
from miles.launch.build.policies import load_engines, read_policies
from miles.launch.build.run import build_evaluator
from miles.launch.build.user_hooks import log_evaluation
from miles.launch.config import Config
from miles.launch.hub.resolve import describe_name
from miles.observe.factory import build_view
from miles.observe.formatting import format_fixed
from miles.observe.output import print_error
from miles.observe.view import View
from miles.rollout.evaluate import compute_pass_rates

Groups = Mapping[str, Sequence[Group]]


def evaluate(config: Config, run: Path | None = None) -> int:
    """Print every held-out metric of ``--hf-checkpoint``, one per line; save them and the samples under ``run``."""
    configure_cublas(config.models.numerics)
    view = build_view(config.observe.view, stream=sys.stderr)  # standard output has only the scores
    try:
        groups, metrics = asyncio.run(_evaluate(config, view))
    finally:
        view.close()
    metrics = dict(metrics) | compute_counts(groups)
    width = max(map(len, metrics))
    for name in sorted(metrics, key=lambda name: name.rpartition("/")[0]):
        value = metrics[name]
        text = str(int(value)) if name.endswith(("/n", "/prompts")) else format_fixed(value, 4)
        print(f"{name.ljust(width)}  {text}")
    if run is not None:
        print(f"Saved {save_evaluation(config, run, groups, metrics)} and its samples.", file=sys.stderr)
    return report_failed_rewards(groups)


def report_failed_rewards(groups: Groups) -> int:
    """Print how many trajectories of each set have no reward and why the first has none; 1 if a whole set has none.

    Consecutive failures up to ``--max-reward-failures`` have ended the evaluation before, as they end training.
    """
    code = 0
    for name, each in groups.items():
        trajectories = [(group.prompt, t) for group in each for t in group.trajectories]
        failed = [(prompt, t) for prompt, t in trajectories if UNSCORED in t.metadata]
        if not failed:
            continue
        prompt, first = failed[0]
        share = f"{len(failed) / len(trajectories):.0%}"
        print_error(
            f"miles: {len(failed)} of {len(trajectories)} trajectories of {name} ({share}) have no reward and count as "
            f"0; the first is sample {first.index} of prompt {prompt.id}: {first.metadata[UNSCORED]}"
        )
        code = max(code, int(len(failed) == len(trajectories)))
    return code


def compute_counts(groups: Groups) -> dict[str, float]:
    """Of every set: the numbers of prompts and trajectories, and pass@k."""
    metrics: dict[str, float] = {}
    for name, each in groups.items():
        metrics[f"eval/{name}/prompts"] = len(each)
        metrics[f"eval/{name}/n"] = sum(len(group.trajectories) for group in each)
        rates = compute_pass_rates(each) or {"pass@1": fmean(group.rewards[0] >= 1.0 for group in each)}
        metrics |= {f"eval/{name}/{key}": rate for key, rate in rates.items()}
    return metrics


def save_evaluation(config: Config, run: Path, groups: Groups, metrics: Mapping[str, float]) -> Path:
    """Write ``eval/CHECKPOINT-N.json``, and the samples to ``.jsonl`` beside it; returns the former."""
    folder, stem = run / "eval", get_model_name(str(config.models.hf_checkpoint))
    folder.mkdir(exist_ok=True)
    number = next(n for n in range(1, 10**6) if not (folder / f"{stem}-{n}.json").exists())
    result = folder / f"{stem}-{number}.json"
    with result.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        for row in _iter_samples(groups):
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    defaults = {option.name: option.default for option in get_options(Config).values()}
    options = {name: value for name, value in flatten_values(config).items() if value != defaults[name]}
    content = {"checkpoint": describe_name(str(config.models.hf_checkpoint)), "metrics": metrics, "options": options}
    result.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    return result


def _iter_samples(groups: Groups) -> Iterator[dict[str, Any]]:
    for name, each in groups.items():
        for group in each:
            for index, (trajectory, reward) in enumerate(zip(group.trajectories, group.rewards, strict=True)):
                yield {
                    "set": name,
                    "prompt": group.prompt.id,
                    "sample": index,
                    "messages": list(group.prompt.messages),
                    "label": group.prompt.label,
                    "response": trajectory.metadata.get("text"),
                    "reward": reward,
                    "status": trajectory.status.value,
                    "response_length": trajectory.response_length,
                }


async def _evaluate(config: Config, view: View) -> tuple[Groups, Mapping[str, float]]:
    with view.stage("Loading the model and the prompts"):
        policies = read_policies(config)
        main, engines = policies.main, await load_engines(policies)
        generation, multi_agent = (
            build_generation(main.config, main.checkpoint),
            build_multi_agent(config, policies),
        )
        scored = generation if multi_agent is None else multi_agent.with_engines(generation, engines, evaluates=True)
        evaluator, notes = build_evaluator(main.config, scored, engines[main.policy.name])
    assert evaluator is not None, "a rule requires --eval-prompt-data"
    for note in notes:
        view.note(note)
    with view.stage("Generating"):
        try:
            groups = await evaluator.groups()
            return groups, log_evaluation(config, groups, evaluator.metrics(groups))
        finally:
            if multi_agent is not None:
                await multi_agent.close()
            await generation.close()
