"""The examples of tools and worlds: each is trained for two steps, and its tool says what its demonstrations say."""

import asyncio
import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
from tests.rollout.generate.talking import Scripted

from miles.core.protocols import Sampling
from miles.core.types import Prompt, Status
from miles.launch.answering import answering_of
from miles.launch.main import main, read
from miles.launch.policy import read_policy
from miles.models.tokenizer import load_tokenizer
from miles.rollout.sandbox.run import sandbox_here

EXAMPLE = Path(__file__).parents[3] / "examples" / "tool_worlds"


def load_module(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(EXAMPLE))
from world import KINDS, around, demonstration, guesses, hidden, write_start  # noqa: E402

run = load_module("tool_worlds_run", EXAMPLE / "run.py")


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    if request.param == "python":
        try:
            sandbox_here(unsandboxed=False, concurrency=1)
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
    assert max(row["unscored_share"] for row in steps) == 0.0, "no tool and no world failed"


def test_an_attempt_has_the_tokens_of_a_demonstration(kind, start, tmp_path):
    """Whoever does what the demonstrations show gets the tool's own answer, and earns all there is."""
    key = "ab"
    tokenizer = load_tokenizer(start)
    shown = demonstration(kind, key, random.Random(0))
    said = [str(m["content"]) for m in shown if m["role"] == "assistant"]
    if kind != "game":
        head, tail = around(kind)
        said = [f"{head}{key}{tail}", hidden(key)]

    async def attempt():
        config, _, _ = read("train", run.grpo_flags(kind, start, start, tmp_path / "unused", steps=1))
        answering = answering_of(config, read_policy(config))
        metadata = {"files": {key: hidden(key)}} if kind == "python" else {}
        prompt = Prompt(id=0, messages=({"role": "user", "content": key},), label=hidden(key), metadata=metadata)
        try:
            return await answering.generate(prompt, Scripted(tokenizer, said), Sampling(max_new_tokens=64))
        finally:
            await answering.close()

    trajectory = asyncio.run(attempt())
    assert (trajectory.status, trajectory.metadata["text"]) == (Status.COMPLETED, hidden(key)), trajectory.metadata
    tokens = list(chain.from_iterable(span.tokens.tolist() for span in trajectory.spans))
    assert tokenizer.render(shown) == [*tokens, *tokenizer.encode("\n")]
    if kind == "game":
        assert trajectory.reward.value == (6 - len(said)) / 5 and len(guesses(3, random.Random(1))) >= 1
