"""Whole runs with user hooks: what a hook changes, may not change, and how runs resume."""

import json
import multiprocessing
from pathlib import Path

import pytest
from tests.launch.small_run import everything, write_inputs

from miles.cluster import spmd
from miles.launch.main import main

PLUGS = "tests.launch.example_hooks"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("edges") / "inputs")


def line(inputs: Path, run: Path, *more: str, steps: int = 1, data: bool = True) -> list[str]:
    prompts = ("--prompt-data", str(inputs / "train.jsonl")) if data else ()
    return [
        *("train", "--hf-checkpoint", str(inputs), *prompts, "--save", str(run), "--label-key", "label"),
        *("--apply-chat-template", "--rm-type", "deterministic_random", "--rollout-batch-size", "2"),
        *("--n-samples-per-prompt", "2", "--rollout-max-response-len", "4", "--num-rollout", str(steps)),
        *("--num-threads", "1", "--device", "cpu", "--view", "plain", "--lr", "1e-2", *more),
    ]


def held_out(inputs: Path) -> tuple[str, ...]:
    return ("--eval-prompt-data", "held", str(inputs / "heldout.jsonl"))


def rows(run: Path) -> list[dict]:
    return [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_hooks_goes_on_as_if_it_had_not_been_stopped(inputs: Path, tmp_path: Path):
    more = (
        *("--data-source-path", f"{PLUGS}:Counting", "--buffer-filter-path", f"{PLUGS}:not_every_third"),
        *("--custom-advantage-function-path", f"{PLUGS}:halved", "--save-interval", "1"),
    )
    assert main(line(inputs, tmp_path / "whole", *more, steps=4, data=False)) == 0
    assert main(line(inputs, tmp_path / "parts", *more, steps=2, data=False)) == 0
    assert main(line(inputs, tmp_path / "parts", *more, steps=4, data=False)) == 0
    assert everything(tmp_path / "whole") == everything(tmp_path / "parts")
    dropped = [json.loads(row) for row in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    assert {row["reason"] for row in dropped if row.get("kept") is False} == {"third"}


def test_lowering_num_rollout_below_finished_steps_ends_the_run(inputs: Path, tmp_path: Path, capsys):
    assert main(line(inputs, tmp_path / "run", steps=2)) == 0
    before = everything(tmp_path / "run")
    assert main(line(inputs, tmp_path / "run", steps=1)) == 0
    assert "has finished 2 steps, and this command asks for 1: nothing is left to train" in capsys.readouterr().out
    assert everything(tmp_path / "run") == before


def test_trajectories_that_are_left_out_teach_nothing(inputs: Path, tmp_path: Path):
    assert main(line(inputs, tmp_path / "all")) == 0
    assert main(line(inputs, tmp_path / "some", "--rollout-sample-filter-path", f"{PLUGS}:first_only")) == 0
    (everyone,), (some,) = rows(tmp_path / "all"), rows(tmp_path / "some")
    assert 0 < some["trained_tokens"] < everyone["trained_tokens"] and some["samples"] == everyone["samples"]


def test_advantages_of_ones_own_are_what_is_trained_with(inputs: Path, tmp_path: Path):
    assert main(line(inputs, tmp_path / "usual")) == 0
    assert main(line(inputs, tmp_path / "halved", "--custom-advantage-function-path", f"{PLUGS}:halved")) == 0
    (usual,), (halved,) = rows(tmp_path / "usual"), rows(tmp_path / "halved")
    assert halved["advantage_std"] == pytest.approx(usual["advantage_std"] / 2)


def test_hooks_are_called_on_every_rank(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Ranks are forked from a process that has what they import.
    multiprocessing.set_forkserver_preload(["miles.launch.distributed.models_fsdp", "tests.launch.small_run"])
    monkeypatch.setattr(spmd, "START_METHOD", "forkserver")
    (tmp_path / "hooks.py").write_text(
        "import os\n"
        "def tell(word):\n"
        f"    with open({str(tmp_path / 'events')!r}, 'a') as file:\n"
        "        file.write(f'{word} {os.getpid()}\\n')\n"
        "def begun(model):\n    tell('init')\n"
        "def stepped(step, update, model, optimizer):\n    tell('step')\n"
    )
    more = (
        *("--custom-megatron-init-path", f"{tmp_path / 'hooks.py'}:begun", "--actor-num-gpus-per-node", "2"),
        *("--custom-megatron-before-train-step-hook-path", f"{tmp_path / 'hooks.py'}:stepped"),
    )
    assert main(line(inputs, tmp_path / "run", *more)) == 0
    reported = (tmp_path / "events").read_text().split()
    assert len(set(reported[1::2])) == 2 and sorted(reported[0::2]) == ["init"] * 2 + ["step"] * 2


def test_a_tracker_that_fails_is_told_no_more_and_the_run_goes_on(inputs: Path, tmp_path: Path, capsys):
    assert main(line(inputs, tmp_path / "run", "--custom-tracker-path", f"{PLUGS}:silent_tracker", steps=2)) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("the service is down") == 1


def test_an_evaluation_alone_asks_the_same_functions(inputs: Path, capsys):
    more = (
        "--eval-function-path",
        f"{PLUGS}:doubled",
        "--custom-eval-rollout-log-function-path",
        f"{PLUGS}:eval_of_mine",
    )
    fixed = ("--apply-chat-template", "--rm-type", "deterministic_random", "--num-threads", "1", "--device", "cpu")
    short = ("--label-key", "label", "--rollout-max-response-len", "4", "--view", "none")
    assert main(["eval", "--hf-checkpoint", str(inputs), *held_out(inputs), *fixed, *short, *more]) == 0
    assert capsys.readouterr().out.split()[:4] == ["eval/mine", "12.0000", "eval/step", "0.0000"]


def test_upstreams_addresses_of_what_is_built_in_are_known(inputs: Path, tmp_path: Path):
    more = (
        *("--custom-generate-function-path", "miles.rollout.generate_hub.multi_turn.generate"),
        *("--rollout-function-path", "miles.rollout.sglang_rollout.generate_rollout"),
        *("--data-source-path", "miles.rollout.data_source.RolloutDataSourceWithBuffer"),
    )
    assert main(line(inputs, tmp_path / "run", *more)) == 0


@pytest.mark.parametrize(
    ("flag", "name", "says"),
    [
        (
            "--rollout-function-path",
            "too_few",
            "made 1 trajectories for prompt 0, and --n-samples-per-prompt is 2",
        ),
        ("--rollout-function-path", "unscored", "left trajectory 0 of prompt 0 without a finite reward"),
        ("--rollout-function-path", "no_group", "The rollout function gave a NoneType"),
        ("--data-source-path", "no_source", "gave a object without next; Source wants next() -> Prompt"),
        ("--data-source-path", "NoPrompts", "The data source gave a str; its next() gives a miles.core.types.Prompt."),
        ("--eval-function-path", "half_a_set", "gave 2 groups for the 6 prompts of held"),
        ("--rollout-sample-filter-path", "one_answer", "returned 1 values for the 2 trajectories of prompt 0"),
        ("--custom-advantage-function-path", "one_array", "returned 1 arrays for 4 samples"),
        ("--custom-advantage-function-path", "too_short", "return a finite number for each trained token"),
        ("--rollout-data-postprocess-path", "fewer_rows", "returned 3 trajectories for 4"),
        ("--rollout-data-postprocess-path", "no_batch", "returned a NoneType; return the miles.core.types.Batch"),
        ("--custom-model-provider-path", "no_model", "The model provider returned None"),
        ("--custom-model-provider-path", "other_shape", "changed the parameter norm.weight from (96,) to (97,)"),
        ("--custom-rollout-log-function-path", "no_metrics", "a number for each name"),
        ("--custom-eval-rollout-log-function-path", "words", "returned None; return the metrics to log"),
    ],
)
def test_a_hook_that_does_not_keep_to_its_door_ends_the_run_in_a_sentence(
    inputs: Path, tmp_path: Path, capsys, flag: str, name: str, says: str
):
    more = (flag, f"{PLUGS}:{name}", "--eval-interval", "1", *held_out(inputs))
    assert main(line(inputs, tmp_path / "run", *more)) != 0
    assert says in capsys.readouterr().err.replace("\n", " ")
