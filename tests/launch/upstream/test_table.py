"""Flags of upstream, TRL, verl and Hugging Face get one right instruction each, and no misleading suggestion."""

from pathlib import Path

import pytest
from tests.launch.small_config import furnish

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.launch.config import Config
from miles.launch.rules.check import check_rules
from miles.launch.upstream.table import explain_unknown_flag, load_upstream_flags


def find_problems(line: str) -> list[str]:
    return list(parse(Config, line.split(), (), explain_unknown_flag).problems)


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("--learning_rate 1e-6", "--lr"),
        ("--learning-rate 1e-6", "--lr"),
        ("--report_to wandb", "--use-tensorboard"),
        ("--num_generations 8", "--n-samples-per-prompt"),
        ("--max_completion_length 512", "--rollout-max-response-len"),
        ("--max_steps 100", "--num-rollout"),
        ("--output_dir out", "--save"),
        ("--model_name_or_path m", "--hf-checkpoint"),
        ("actor_rollout_ref.model.path=m", "--hf-checkpoint"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "--lr"),
        ("actor_rollout_ref.rollout.n=8", "--n-samples-per-prompt"),
        ("data.train_batch_size=32", "--rollout-batch-size"),
        ("trainer.nnodes=2", "--actor-num-nodes"),
        ("algorithm.gamma=0.9", "--gamma"),
    ],
)
def test_the_name_of_another_framework_is_translated(line: str, ours: str):
    (problem,) = find_problems(line)
    assert f"is called {ours} here" in problem


def test_beta_names_both_meanings():
    assert find_problems("--beta 0.04") == [
        "--beta is called --use-kl-loss with --kl-loss-coef, or --dpo-beta for DPO here."
    ]


def test_flags_of_several_adapters_name_the_training_service():
    for flag, row in load_upstream_flags().items():
        if flag.startswith("--multi-lora-"):
            assert "miles serve MODEL --train" in row.text, flag
    (problem,) = find_problems("--multi-lora-n-adapters 8")
    assert "--service-max-adapters N" in problem


@pytest.mark.parametrize(
    ("flag", "feature"),
    [
        ("--te-precision-config-file", "precision by a file"),
        ("--fp4-recipe", "training in FP4"),
        ("--eval-num-gpus", "engines that only evaluate"),
        ("--vllm-dtype", "vLLM"),
    ],
)
def test_a_missing_feature_is_said_to_be_missing(flag: str, feature: str):
    (problem,) = find_problems(f"{flag} x")
    assert f"{flag} asks for {feature}" in problem and "which is not supported" in problem
    assert "remove it" not in problem and "did you mean" not in problem


def test_no_missing_feature_is_to_be_removed_from_the_command_line():
    for flag, row in load_upstream_flags().items():
        assert "remove it" not in f"{row.text} {row.feature}", flag


@pytest.mark.parametrize(
    "flag", ["--use-swanlab", "--profile-target", "--update-weight-disk-dir", "--use-vllm", "--frobnicate"]
)
def test_a_flag_is_not_suggested_for_another_one(flag: str):
    (problem,) = find_problems(f"{flag} x")
    assert "did you mean" not in problem


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--max-response-len", "--rollout-max-response-len"),
        ("--use-kl", "--use-kl-loss"),
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--advantage-estimater", "--advantage-estimator"),
    ],
)
def test_a_misspelled_or_shortened_flag_is_suggested(flag: str, meant: str):
    (problem,) = find_problems(f"{flag} 1")
    assert meant in problem


def test_loading_and_saving_one_new_folder_starts_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)

    def check(line: str) -> list[str]:
        result = parse(Config, line.split(), read_layers("good.toml"))
        return [*result.problems, *check_rules(result, "plan")]

    assert check("--load new --save new") == []
    assert check("--load new --save other") == ["--load new is not a folder; name a run or one of its checkpoints."]
