"""Held-out sets with options of their own: data, columns, sampling, trajectories and grader."""

import json
from pathlib import Path

import pytest
from tests.launch.small_run import flags, write_inputs

from miles.core.errors import UsageError
from miles.launch.main import main
from miles.launch.read_config import read

GRADERS = """
async def seven(args, sample):
    assert sample.metadata["kind"] == "other"
    return {"a": 7.0, "b": float(sample.response_length)}
"""
CONFIG = """
eval:
  defaults: {max_response_len: 3}
  datasets:
    - {name: first, path: HELD, n_samples_per_eval_prompt: 2}
    - name: second
      path: OTHER
      custom_rm_path: GRADERS:seven
      reward_key: a
      input_key: question
      label_key: answer
      temperature: 0.0
      max_response_len: 2
      metadata_overrides: {kind: other}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("world"))


@pytest.fixture
def line(world: Path, tmp_path: Path) -> list[str]:
    rows = [json.loads(line) for line in (world / "heldout.jsonl").read_text().splitlines()]
    other = [json.dumps({"question": row["input"], "answer": row["label"]}) for row in rows[:2]]
    (tmp_path / "other.jsonl").write_text("\n".join(other))
    (tmp_path / "graders.py").write_text(GRADERS)
    text = CONFIG.replace("HELD", str(world / "heldout.jsonl")).replace("OTHER", str(tmp_path / "other.jsonl"))
    (tmp_path / "sets.yaml").write_text(text.replace("GRADERS", str(tmp_path / "graders.py")))
    return flags(world, tmp_path / "run", "--eval-config", str(tmp_path / "sets.yaml"), steps=2)


def read_evaluations(run: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if any(name.startswith("eval/") for name in row)]


def test_every_set_has_its_own_data_sampling_and_grader(line: list[str], tmp_path: Path):
    assert main(["train", *line]) == 0
    metrics = read_evaluations(tmp_path / "run")[0]
    assert metrics["eval/second/reward"] == 7.0
    assert metrics["eval/second/response_length"] <= 2 < metrics["eval/first/response_length"] <= 3
    (tmp_path / "sets.yaml").unlink()
    config, plan, _ = read("train", [str(tmp_path / "run" / "config.toml")])
    assert list(plan.eval_sets) == ["first", "second"]
    assert config.rollout.eval_options["first"] == {"max_response_len": 3, "n_samples_per_eval_prompt": 2}
    assert main(["eval", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("temperature: 0.0", "temperature: -1", "temperature of second must be at least 0, not -1."),
        ("temperature: 0.0", "frobnicate: 1", "frobnicate of second is not a key of a dataset"),
        ("name: second", "name: first", "two datasets are called first"),
        ("eval:", "other:", "names no datasets"),
        ("custom_rm_path:", "rm_type:", "Held-out set second:"),
    ],
)
def test_a_wrong_set_is_refused_in_a_sentence(line: list[str], tmp_path: Path, before: str, after: str, problem: str):
    file = tmp_path / "sets.yaml"
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(UsageError) as error:
        read("plan", line)
    assert any(problem in one for one in error.value.problems), error.value.problems


def test_evaluation_has_limits_and_a_reward_key_of_its_own(line: list[str], tmp_path: Path):
    file = tmp_path / "sets.yaml"
    lines = [one for one in file.read_text().splitlines() if "first" not in one and "reward_key" not in one]
    file.write_text("\n".join(lines).replace("max_response_len: 2", "max_response_len: 6"))
    limits = ("--eval-max-prompt-len", "22", "--eval-reward-key", "b")
    assert main(["train", *line, *limits]) == 0
    longest = read_evaluations(tmp_path / "run")[0]
    assert longest["eval/second/reward"] == longest["eval/second/response_length"] > 2
    save = ("--save", str(tmp_path / "other"), "--eval-max-context-len", "9")
    assert main(["train", *line, *limits, *save]) == 0
    assert read_evaluations(tmp_path / "other")[0]["eval/second/response_length"] < longest["eval/second/reward"]


TOOL_HOOK = """
async def grade(args, sample):
    assert "[abc]" in sample.prompt and sample.metadata["tools"][0]["name"] == "abc"
    return 1.0
"""


def test_the_chat_template_lists_the_tools_of_a_row(tmp_path: Path):
    world = write_inputs(tmp_path / "world")
    file = world / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["chat_template"] = "{% if tools %}[{{ tools[0].name }}]{% endif %}" + tokenizer["chat_template"]
    file.write_text(json.dumps(tokenizer))
    rows = [json.loads(row) for row in (world / "train.jsonl").read_text().splitlines()]
    tools = json.dumps([{"name": "abc"}])
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row | {"tools": tools}) for row in rows))
    (tmp_path / "hook.py").write_text(TOOL_HOOK)
    (tmp_path / "data.jsonl").rename(world / "train.jsonl")
    hook = (
        "--custom-rm-path",
        f"{tmp_path / 'hook.py'}:grade",
        "--no-dynamic-sampling-filter-path",
        "--no-eval-interval",
    )
    line = flags(world, tmp_path / "run", "--tool-key", "tools", *hook, "--skip-eval-before-train", steps=2)
    assert main(["train", *line]) == 0
