"""What returns and the critic ask of a command line, and what a plan then says of them."""

import json
from pathlib import Path

import pytest
from tests.launch.small_config import QWEN3, furnish

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.launch.config import Config
from miles.launch.plan.memory import estimate_memory
from miles.launch.read_config import read
from miles.launch.rules.check import check_rules
from miles.models.accounting.params import parameter_count
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config

PPO = "--advantage-estimator ppo"


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    for name, changed in {"narrow": {"vocab_size": 500}, "untied": {"tie_word_embeddings": False}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN3 | changed))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def list_problems(line: str) -> list[str]:
    reading = parse(Config, line.split(), read_layers("good.toml"))
    return [*reading.problems, *check_rules(reading, "train")]


@pytest.mark.parametrize(
    "line",
    [
        PPO,
        f"{PPO} --n-samples-per-prompt 1 --gamma 0.99 --lambd 0.95 --kl-coef 0.01 --normalize-advantages",
        f"{PPO} --critic-load moe --critic-lr 1e-5 --critic-lr-warmup-iters 3 --num-critic-only-steps 2 --value-clip 1",
        "--advantage-estimator reinforce_plus_plus --normalize-advantages --n-samples-per-prompt 1 --kl-coef 0.01",
        "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages --gamma 0.9",
        "--normalize-advantages",
        "--kl-coef 0",
        f"{PPO} --critic-device cpu",
    ],
)
def test_what_goes_together_is_accepted(line: str):
    assert list_problems(line) == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "--critic-device cpu",
            "--critic-device needs --advantage-estimator ppo; add that, or remove --critic-device.",
        ),
        (f"{PPO} --critic-device gpu", "--critic-device gpu is not a device; use auto, cpu, cuda or cuda:1."),
        (
            f"{PPO} --critic-device cuda:1",
            "--critic-device cuda:1 does not exist: this machine has no accelerators; name another.",
        ),
        (
            "--kl-coef 0.1",
            "--kl-coef 0.1 is subtracted from token rewards, which --advantage-estimator grpo does not use; put the KL "
            "in the loss with --use-kl-loss and --kl-loss-coef.",
        ),
        (
            "--gamma 0.9",
            "--gamma needs --advantage-estimator reinforce_plus_plus, reinforce_plus_plus_baseline or ppo; add that, "
            "or remove --gamma.",
        ),
        ("--lambd 0.9", "--lambd needs --advantage-estimator ppo; add that, or remove --lambd."),
        ("--gamma 1.5", "--gamma must be at least 0 and at most 1, not 1.5."),
        (f"{PPO} --value-clip 0", "--value-clip must be above 0, not 0."),
        (
            "--advantage-estimator reinforce_plus_plus",
            "--advantage-estimator reinforce_plus_plus is defined with advantages normalized over the batch; add "
            "--normalize-advantages.",
        ),
        (
            "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type --normalize-advantages",
            "--loss-type sft_loss trains on demonstrations, so --normalize-advantages has no effect; remove it.",
        ),
        (
            "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type --advantage-estimator ppo",
            "--loss-type sft_loss trains on demonstrations, so --advantage-estimator ppo has no effect; remove it.",
        ),
        ("--critic-lr 1e-5", "--critic-lr needs --advantage-estimator ppo; add that, or remove --critic-lr."),
        (
            f"{PPO} --critic-load nowhere",
            "--critic-load nowhere does not exist; name the folder of a Hugging Face checkpoint, or hf://ORG/NAME.",
        ),
        (
            f"{PPO} --critic-load narrow",
            "--critic-load narrow has 500 tokens and --hf-checkpoint 1000; name a critic with the policy's whole "
            "vocabulary.",
        ),
        (
            f"{PPO} --min-lr 1e-6 --critic-lr 1e-7",
            "--min-lr 1e-06 is above --critic-lr 1e-07; lower --min-lr.",
        ),
        (
            f"{PPO} --lr-decay-iters 3 --critic-lr-warmup-iters 4",
            "--critic-lr-warmup-iters 4 is longer than --lr-decay-iters 3; shorten it.",
        ),
        (
            f"{PPO} --num-critic-only-steps 10",
            "--num-critic-only-steps 10 leaves none of the --num-rollout 10 steps for the policy; lower it.",
        ),
    ],
)
def test_what_does_not_is_told_in_one_sentence(line: str, sentence: str):
    assert list_problems(line) == [sentence]


@pytest.mark.parametrize(
    ("line", "reference", "critic"),
    [
        ("", None, None),
        (PPO, None, "model"),
        (f"{PPO} --kl-coef 0.1", "model", "model"),
        (f"{PPO} --critic-load moe --kl-coef 0.1 --ref-load untied", "untied", "moe"),
    ],
)
def test_a_plan_names_the_models_a_run_holds(line: str, reference: str | None, critic: str | None):
    _, plan, _ = read("plan", ["good.toml", *line.split()])
    assert plan.reference == (reference and Path(reference)) and plan.critic == (critic and Path(critic))


def test_a_plan_counts_only_the_steps_in_which_the_policy_learns():
    _, plan, _ = read(
        "plan", ["good.toml", *PPO.split(), "--num-critic-only-steps", "3", "--num-steps-per-rollout", "2"]
    )
    assert (plan.steps, plan.optimizer_steps) == (10, 14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("folder", ["model", "untied"])
def test_the_memory_plan_counts_the_critic_parameter_by_parameter(folder: str, dtype: str):
    config, plan, _ = read("plan", ["good.toml", *PPO.split(), "--critic-load", folder, "--dtype", dtype])
    found = {share.name: share.bytes for share in estimate_memory(config, plan, spec_from_config(read_config("model")))}
    whole, head = parameter_count(spec_from_config(read_config(folder))), 97
    trained = whole - (96_000 if folder == "untied" else 0)  # an output weight of its own is never used
    assert found["critic"] == whole * (4 if dtype == "float32" else 2) + 4 * head
    assert found["critic grad"] == 4 * (trained + head)
    assert found["critic adam"] == (8 if dtype == "float32" else 12) * trained + 8 * head
    without, plain, _ = read("plan", ["good.toml"])
    assert not [
        s for s in estimate_memory(without, plain, spec_from_config(read_config("model"))) if "critic" in s.name
    ]
