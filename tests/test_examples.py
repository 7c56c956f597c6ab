"""The examples that make their own small model: what demonstrations show is what a run does, and each run learns."""

import asyncio
import json
import random
import re
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.numpy import load_file
from tests.rollout.generate.scripted_engine import Scripted

from miles.core.protocols import SamplingParams
from miles.core.types import Author, Prompt, Status, Trajectory
from miles.launch.build.generation import build_generation
from miles.launch.build.models import read_policy
from miles.launch.main import main
from miles.launch.read_config import read
from miles.models.tokenizer import load_tokenizer
from miles.observe.rollout_reader import read_step_rollouts
from miles.rollout.sandbox.run import create_sandbox

EXAMPLES = Path(__file__).parents[1] / "examples"
IN_SANDBOX = ("coding_agent", "terminal_agent")
ROLES = {"doctor_patient": ("doctor", "patient"), "deep_research": ("researcher", "reader")}
CALLED = ("coding_agent", "mcp_tools", "search_agent", "terminal_agent")
NAMES = (*CALLED, *ROLES, "curriculum", "custom_environment", "custom_loss", "game")
WARMUP_STEPS = {"coding_agent": 60, "search_agent": 60, "mcp_tools": 60, "terminal_agent": 120}
"""Until calls are well formed; the others need fewer."""


def load_run(name: str) -> ModuleType:
    """The example's ``run.py`` under a name of its own."""
    sys.path.insert(0, str(EXAMPLES / name))
    spec = spec_from_file_location(f"{name}_run", EXAMPLES / name / "run.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    if request.param in IN_SANDBOX:
        try:
            create_sandbox(unsandboxed=False, concurrency=1)
        except Exception as error:
            pytest.skip(f"no sandbox here: {error}")
    if request.param == "mcp_tools":
        pytest.importorskip("mcp")
    return request.param


def few(flags: list[str]) -> list[str]:
    """The same with little to do in a step."""
    small = {"--rollout-batch-size": "4", "--n-samples-per-prompt": "8", "--n-samples-per-eval-prompt": "1"}
    return [small.get(before, word) for before, word in zip(["", *flags], flags, strict=False)]


def trajectories(run: Path, step: int) -> list[Trajectory]:
    groups = read_step_rollouts(run / "rollouts" / f"step-{step:06d}.parquet").groups
    return [trajectory for group in groups for trajectory in group.trajectories]


def count_turns(trajectory: Trajectory) -> int:
    """The most turns of a branch."""
    return max(sum(span.author is Author.POLICY for span in spans) for spans in trajectory.branches)


def are_equal(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return all((a[key] == b[key]).all() for key in a)


def test_each_example_is_warmed_up_and_trained(name, tmp_path):
    """A few steps of both stages, and what the example is about has happened."""
    run, (start, warmup, grpo) = load_run(name), (tmp_path / each for each in ("start", "warmup", "grpo"))
    run.write_start(start, demonstrations=1024)
    assert main(["train", *run.warmup_flags(start, warmup, steps=WARMUP_STEPS.get(name, 30))]) == 0
    (warm,) = (warmup / "checkpoints").glob("step-*")
    assert main(["train", *few(run.grpo_flags(start, warm, grpo, steps=3))]) == 0
    metrics = [json.loads(line) for line in (grpo / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if row["kind"] == "train"]
    assert len(steps) == 3 and max(row["parity_max_abs"] for row in steps) < 1e-4
    assert max(row["unscored_ratio"] for row in steps) == 0.0, "nothing failed"
    tried = trajectories(grpo, 1)
    if name not in (*ROLES, "curriculum"):  # whose first games have one move
        assert max(map(count_turns, tried)) > 1, "several turns"
    if name in CALLED:
        assert sum(each.metadata["tool_calls"] - each.metadata["tool_failures"] for each in tried) > 0
    if name == "custom_loss":
        assert max(row["penalty"] for row in steps) > 0, "the example's own loss"
    if name == "custom_environment":
        assert {"reward/key", "reward/door"} & set(steps[0]), "parts of the environment's reward"
    if name == "curriculum":
        groups = read_step_rollouts(grpo / "rollouts" / "step-000001.parquet").groups
        assert {group.prompt.metadata["pile"] for group in groups} <= {1, 2, 3}, "small piles first"
    trained = grpo / "checkpoints" / "step-000003"
    others = [trained / "policies" / role for role in ROLES.get(name, ())[1:]]
    for policy in (trained, *others):
        assert not are_equal(policy, warm), f"{policy.name} was trained"
    for role in ROLES.get(name, ()):
        assert f"reward/{role}" in steps[0]
    assert not others or not are_equal(trained, others[0]), "each has its own weights"


def test_the_command_of_an_example_prints_its_curve(tmp_path, monkeypatch, capsys):
    """``run.py FOLDER SEED``: both stages in processes of their own, seeded, and the held-out rewards at the end."""
    run = load_run("custom_environment")
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path), "3"])
    monkeypatch.setattr(run.warmup_flags, "__defaults__", (2,))
    monkeypatch.setattr(run.grpo_flags, "__defaults__", (1,))
    run.main()
    assert re.search(r"^heldout: reward \d\.\d\d at step 0, \d\.\d\d at step 1\ntook \d+ s", capsys.readouterr().out)
    config = (tmp_path / "grpo" / "config.toml").read_text()
    assert re.search(r"^seed = 3\b", config, re.MULTILINE) and re.search(r"^rollout_seed = 3\b", config, re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A demonstration that is done well, the row it belongs to, and what it earns from an environment."""

    messages: list[dict[str, Any]]
    row: dict[str, Any]
    earns: float | None = None


def show(name: str) -> Shown:
    load_run(name)  # and with it the path to its modules
    chance = random.Random(0)
    if name == "coding_agent":
        from repository import demonstrate, row

        return Shown(
            messages=demonstrate("merge", "sum", "*", chance, well=True), row=row("merge", "sum", "*"), earns=1
        )
    if name == "terminal_agent":
        from terminal import demonstrate, row

        return Shown(messages=demonstrate("ab", chance, well=True), row=row("ab"), earns=1)
    if name == "search_agent":
        from trail import Trail, demonstrate

        trail = Trail(0)
        asked = next(iter(trail.refers))
        row = {"input": asked, "label": trail.answer(asked)}
        return Shown(messages=demonstrate(trail, asked, chance, well=True), row=row)
    if name == "mcp_tools":
        from shop import demonstrate, number, question

        row = {"input": question("price", "ab"), "label": number("price", "ab")}
        return Shown(messages=demonstrate("price", "ab", chance, well=True), row=row)
    from corridor import demonstrate
    from corridor import show as see

    row = {"input": see(2, 4, 0), "label": "", "metadata": {"places": (2, 4, 0)}}
    return Shown(messages=demonstrate(2, 4, 0, chance, good=1.0), row=row, earns=1)


@pytest.mark.parametrize("name", [*CALLED, "custom_environment"], indirect=True)
def test_whoever_does_what_is_shown_earns_all_there_is(name, tmp_path):
    """The tokens of such a trajectory are those of the demonstration, tool results included."""
    run, shown = load_run(name), show(name)
    from small_model import call_pieces  # of examples/shared, which run.py has put on the path

    run.write_start(tmp_path, demonstrations=4)
    tokenizer = load_tokenizer(tmp_path)
    said = []
    for message in shown.messages:
        if message["role"] == "assistant":
            calls = [each["function"] for each in message.get("tool_calls", ())]
            said.append(
                "".join(call_pieces(each["name"], **each["arguments"])[0] for each in calls) or message["content"]
            )

    async def attempt() -> Trajectory:
        config, _, _ = read("train", run.grpo_flags(tmp_path, tmp_path, tmp_path / "unused", steps=1))
        answering = build_generation(config, read_policy(config))
        first = ({"role": "user", "content": shown.row["input"]},)
        prompt = Prompt(id=0, messages=first, label=shown.row["label"], metadata=shown.row.get("metadata", {}))
        try:
            return await answering.generate(prompt, Scripted(tokenizer, said), SamplingParams(max_new_tokens=64))
        finally:
            await answering.close()

    trajectory = asyncio.run(attempt())
    assert trajectory.status is Status.COMPLETED, trajectory.metadata
    tokens = list(chain.from_iterable(span.tokens.tolist() for span in trajectory.spans))
    assert tokenizer.apply_chat_template(shown.messages) == [*tokens, *tokenizer.encode("\n")]
    if shown.earns is None:
        assert trajectory.metadata["text"] == shown.row["label"]
    else:
        assert trajectory.reward is not None and trajectory.reward.value == pytest.approx(shown.earns)


def test_hidden_tests_refuse_a_wrong_fix(tmp_path):
    """The check of the coding agent is not passed by the file as it was, nor by another operator."""
    load_run("coding_agent")
    from repository import OPERATORS, PATH, row, source

    check = str(row("merge", "sum", "*")["metadata"]["check"])
    passed = set()
    for operator in OPERATORS.values():
        file = tmp_path / str(ord(operator[0])) / PATH  # of its own: one that is rewritten may be read from its cache
        file.parent.mkdir(parents=True)
        file.write_text(source("merge", "sum", operator))
        try:
            exec(compile(check.replace(repr(PATH), repr(str(file))), "check", "exec"), {})
        except AssertionError:
            continue
        passed.add(operator)
    assert passed == {"+"}


def test_a_player_who_leaves_multiples_of_four_beats_any_opponent():
    load_run("game")
    from nim import PILES, Nim, row

    async def play(pile: int) -> float:
        game, reply = Nim(), str(pile % 4)
        fields = row(pile, skill=1.0)
        await game.open(Prompt(id=pile, messages=(), metadata=fields["metadata"]))
        while True:
            result = await game.step({"role": "assistant", "content": reply})
            if result.done:
                assert result.reward is not None
                return result.reward
            reply = str(int(str(result.messages[0]["content"]).split()[0]) % 4)

    assert {asyncio.run(play(pile)) for pile in PILES if pile % 4} == {1.0}
