"""The examples of tools and environments: each trains for two steps, and its tool answers as its demonstrations do."""

import asyncio
import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
from tests.rollout.generate.scripted_engine import Scripted

from miles.core.protocols import SamplingParams
from miles.core.types import Prompt, Status
from miles.launch.build.generation import build_generation
from miles.launch.build.models import read_policy
from miles.launch.main import main
from miles.launch.read_config import read
from miles.models.tokenizer import load_tokenizer
from miles.rollout.sandbox.run import create_sandbox

EXAMPLE = Path(__file__).parents[3] / "examples" / "tool_environments"


def load_module(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(EXAMPLE))
from environment import CALLS, KINDS, around, demonstration, hidden, pieces, row, write_start  # noqa: E402
from words import words  # noqa: E402

run = load_module("tool_environments_run", EXAMPLE / "run.py")


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    if request.param == "verifiers":
        old = tuple(map(int, pytest.importorskip("verifiers").__version__.split(".")[:2])) < (0, 4)
        if not old:
            pytest.skip("letters_env is an environment of verifiers before 0.4")
    if request.param == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    if request.param in ("python", "shell"):
        try:
            create_sandbox(unsandboxed=False, concurrency=1)
        except Exception as error:
            pytest.skip(f"no sandbox here: {error}")
    return request.param


@pytest.fixture(scope="module")
def start(kind, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    write_start(folder, kind, demonstrations=32)
    return folder


def few(flags: list[str]) -> list[str]:
    """The same with little to do in a step."""
    small = {"--rollout-batch-size": "4", "--n-samples-per-prompt": "4"}
    return [small.get(before, word) for before, word in zip(["", *flags], flags, strict=False)]


def test_each_world_is_trained_in(kind, start, tmp_path):
    grpo = tmp_path / "grpo"
    assert main(["train", *few(run.grpo_flags(kind, start, start, grpo, steps=2))]) == 0
    steps = run.measured(grpo, "train")
    assert len(steps) == 2 and max(row["parity_max_abs"] for row in steps) < 1e-4
    assert max(row["unscored_ratio"] for row in steps) == 0.0, "no tool and no environment failed"


def test_the_warm_up_is_a_run_of_its_own(tmp_path):
    write_start(tmp_path / "start", "files", demonstrations=32)
    assert main(["train", *few(run.warmup_flags(tmp_path / "start", tmp_path / "warmup", steps=2))]) == 0
    assert run.newest(tmp_path / "warmup").name == "step-000002"


def asked(kind: str) -> str:
    """Something of this kind to find out."""
    return words(0, but=pieces())[0] if kind == "reasoning_gym" else "ab"


def test_an_attempt_has_the_tokens_of_a_demonstration(kind, start, tmp_path):
    """Whoever does what the good demonstrations show gets the tool's own answer, and earns all there is."""
    key = asked(kind)
    tokenizer = load_tokenizer(start)
    shown = demonstration(kind, key, random.Random(0))
    said = [str(m["content"]) for m in shown if m["role"] == "assistant"]
    if kind in CALLS:
        head, tail = around(kind)
        said = [f"{head}{key}{tail}", hidden(key)]
    asks = row(kind, key)
    messages = ({"role": "user", "content": asks["input"]},)

    async def attempt():
        config, _, _ = read("train", run.grpo_flags(kind, start, start, tmp_path / "unused", steps=1))
        answering = build_generation(config, read_policy(config))
        prompt = Prompt(id=0, messages=messages, label=asks["label"], metadata=asks["metadata"])
        try:
            return await answering.generate(prompt, Scripted(tokenizer, said), SamplingParams(max_new_tokens=64))
        finally:
            await answering.close()

    trajectory = asyncio.run(attempt())
    assert (trajectory.status, trajectory.metadata["text"]) == (Status.COMPLETED, asks["label"]), trajectory.metadata
    tokens = list(chain.from_iterable(span.tokens.tolist() for span in trajectory.spans))
    assert tokenizer.apply_chat_template(shown) == [*tokens, *tokenizer.encode("\n")]
    if kind not in CALLS or kind == "verifiers":  # an environment, which gives the reward itself
        assert trajectory.reward.value == ((6 - len(said)) / 5 if kind == "game" else 1.0)


def test_what_is_done_badly_reaches_for_no_tool_and_is_seldom_right(kind):
    chance = random.Random(0)
    key = asked(kind)
    bad = [demonstration(kind, key, chance, well=False) for _ in range(50)]
    label = row(kind, key)["label"]
    right = sum(messages[-1]["content"] == label for messages in bad)
    assert right < 40 and all("tool_calls" not in message for messages in bad for message in messages)
    assert max(len(messages) for messages in bad) <= (10 if kind == "game" else 6), "as many replies as a run allows"
