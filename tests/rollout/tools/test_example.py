"""The calculator example: its pieces fit, and its small model learns to reach for the tool."""

import asyncio
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
from tests.launch.small_run import miles
from tests.rollout.generate.scripted_engine import Scripted

from miles.core.protocols import SamplingParams
from miles.core.types import Author, Prompt, Status
from miles.hooks.registry import GENERATE


def load_module(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator_tool"
sys.path.insert(0, str(EXAMPLE))
from products import CALL, DONE, demonstration, tokenizer, write_start  # noqa: E402

run = load_module("calculator_run", EXAMPLE / "run.py")


def test_a_trajectory_has_the_tokens_of_a_demonstration():
    made = tokenizer()
    generate = GENERATE.load(f"{EXAMPLE / 'generate.py'}:Calculating")
    engine = Scripted(made, [f"{CALL}37*48{DONE}", "1776"])
    prompt = Prompt(id=0, messages=({"role": "user", "content": "37*48"},))
    trajectory = asyncio.run(generate(prompt, engine, SamplingParams(max_new_tokens=24)))
    assert (trajectory.status, trajectory.metadata["text"]) == (Status.COMPLETED, "1776")
    tokens = list(chain.from_iterable(span.tokens.tolist() for span in trajectory.spans))
    shown = made.apply_chat_template(demonstration(37, 48, calls=True))
    assert shown == [*tokens, *made.encode("\n")]  # which the template writes behind a last turn, and nobody reads
    said = [span.tokens.tolist() for span in trajectory.spans if span.author is Author.POLICY]
    assert list(chain.from_iterable(said)) == list(chain.from_iterable(engine.gave))


@pytest.mark.slow
def test_a_small_model_learns_to_reach_for_its_calculator(tmp_path):
    start, warmup, grpo = tmp_path / "start", tmp_path / "warmup", tmp_path / "grpo"
    write_start(start)
    done = miles("train", *run.warmup_flags(start, warmup))
    assert done.returncode == 0, done.stderr
    done = miles("train", *run.grpo_flags(start, run.newest(warmup), grpo, steps=20))
    assert done.returncode == 0, done.stderr
    before, after = (row["eval/heldout/reward"] for row in run.measured(grpo, "eval"))
    rewards = [row["reward"] for row in run.measured(grpo, "train")]
    reported = f"trained on {fmean(rewards[:3]):.3f} -> {fmean(rewards[-5:]):.3f}, held out {before:.3f} -> {after:.3f}"
    assert 0.2 < before < 0.7 and after > before + 0.25 and fmean(rewards[-5:]) > 0.65, reported
    assert max(row["parity_mean_abs"] for row in run.measured(grpo, "train")) < 1e-5
