"""Rules of a user's own code: a hook that no part of the run would call is refused before anything starts."""

from pathlib import Path

import pytest
from tests.launch.small_config import furnish

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.launch.config import Config
from miles.launch.rules.check import check_rules

OWN = "mine.py:f"


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)


def list_problems(line: str) -> list[str]:
    reading = parse(Config, line.split(), read_layers("good.toml"))
    return [*reading.problems, *check_rules(reading, "plan")]


@pytest.mark.parametrize(
    "line",
    [
        f"--rollout-function-path {OWN} --data-source-path {OWN}",
        f"--data-source-path {OWN} --no-prompt-data",
        "--rollout-function-path standard",
        "--custom-generate-function-path miles.rollout.generate_hub.single_turn.generate",
        "--custom-async-data-buffer-path freshest --max-weight-staleness 1 --reorder-window 4",
        f"--custom-advantage-function-path {OWN} --rollout-data-postprocess-path {OWN}",
        f"--custom-model-provider-path {OWN} --custom-megatron-init-path {OWN} --custom-tracker-path {OWN}",
        f"--eval-function-path {OWN} --eval-prompt-data held data/held.jsonl",
    ],
)
def test_what_is_called_is_let_in(line: str):
    assert list_problems(line) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "--rollout-function-path mine",
            "--rollout-function-path mine is not an import path: write package.module:name",
        ),
        ("--custom-tracker-path wandb", "--custom-tracker-path wandb is not an import path"),
        (f"--data-source-path {OWN} --no-num-rollout --num-epoch 2", "has no end, so --num-epoch"),
        (f"--data-source-path {OWN} --curriculum-path {OWN}", "both choose the next prompt; keep one"),
        (f"--custom-async-data-buffer-path {OWN}", "needs --reorder-window 2 or more"),
        (f"--custom-model-provider-path {OWN} --actor-num-gpus-per-node 2", "builds a model for one GPU"),
        (f"--custom-model-provider-path {OWN} --model-impl transformers", "needs the native model"),
        (
            f"--custom-advantage-function-path {OWN} --advantage-estimator reinforce_plus_plus_baseline",
            "both compute per-token advantages; use grpo",
        ),
        (f"--eval-function-path {OWN}", "needs --eval-prompt-data"),
        (f"--custom-eval-rollout-log-function-path {OWN}", "needs --eval-prompt-data"),
        (
            "--custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate",
            "runs an agent; name it with --custom-agent-function-path",
        ),
        (
            "--rollout-function-path miles.rollout.sft_rollout.generate_rollout",
            "trains on replies of the data; use --loss-type sft_loss instead",
        ),
    ],
)
def test_what_no_part_of_the_run_would_call_is_refused(line: str, says: str):
    assert any(says in sentence for sentence in list_problems(line)), list_problems(line)


@pytest.mark.parametrize(
    "flag",
    [
        *("--rollout-function-path", "--rollout-sample-filter-path", "--rollout-all-samples-process-path"),
        *("--buffer-filter-path", "--custom-advantage-function-path", "--custom-rollout-log-function-path"),
        "--custom-megatron-before-log-prob-hook-path",
    ],
)
def test_demonstrations_leave_hooks_of_trajectories_idle(flag: str):
    line = f"--loss-type sft_loss --no-rm-type --n-samples-per-prompt 1 {flag} {OWN}"
    assert [sentence for sentence in list_problems(line) if f"so {flag} has no effect; remove it" in sentence]
