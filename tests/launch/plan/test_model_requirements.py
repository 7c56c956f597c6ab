"""`miles plan MODEL`: memory requirements from the config alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles.launch.main import main
from miles.models.accounting.known_models import load_known_models


def plan_model(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_needs_of_a_published_model_follow_from_its_size(capsys: pytest.CaptureFixture[str]):
    """Llama 3.1 8B: 2 bytes of weights, 4 of gradients, 12 of optimizer a parameter; 128 KiB of cache a token."""
    size = 8_030_261_248
    needs = plan_model(capsys, "Llama-3.1-8B")
    assert needs["parameters"] == needs["active_parameters"] == size
    assert (needs["weights"], needs["gradients"], needs["optimizer"]) == (2 * size, 4 * size, 12 * size)
    assert needs["kv_per_token"] == 128 * 1024 and needs["reference"] == 0
    assert needs["training"] == 18 * size + needs["activations"]


def test_a_mixture_is_paid_for_whole_and_computed_in_part(capsys: pytest.CaptureFixture[str]):
    needs = plan_model(capsys, "deepseek-ai/DeepSeek-V3")
    assert round(needs["parameters"] / 1e9) == 671 and round(needs["active_parameters"] / 1e9) == 38
    assert needs["kv_per_token"] == 61 * (512 + 64) * 2
    assert needs["layers"] == "58 of MLA + 8 of 256 experts, 3 of MLA + MLP"


def test_a_vision_tower_is_counted_and_named(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "Qwen3-VL-8B-Instruct"]) == 0
    text = capsys.readouterr().out
    assert "8.77B parameters" in text and "a vision tower of 27 blocks with 576.4M parameters" in text


def test_exact_parity_counts_a_cache_of_expanded_latent_keys_and_values(capsys: pytest.CaptureFixture[str]):
    needs = plan_model(capsys, "deepseek-ai/DeepSeek-V3", "--parity", "exact")
    assert needs["kv_per_token"] == 61 * 128 * (128 + 64 + 128) * 2


def test_flags_that_change_the_needs_count(capsys: pytest.CaptureFixture[str]):
    plain = plan_model(capsys, "Qwen3-4B")
    wide = plan_model(capsys, "Qwen3-4B", "--dtype", "float32", "--use-kl-loss", "--rollout-max-context-len", "4096")
    assert wide["weights"] == 2 * plain["weights"] == wide["reference"]
    assert (plain["context"], wide["context"]) == (40960, 4096)
    again = plan_model(capsys, "Qwen3-4B", "--gradient-checkpointing", "--max-tokens-per-gpu", "8192")
    assert again["activations_checkpointed"] < plain["activations_checkpointed"] < plain["activations"]
    assert again["training"] < plain["training"]


def test_every_model_the_trainer_holds_beside_the_policy_counts(capsys: pytest.CaptureFixture[str]):
    plain, teacher = plan_model(capsys, "Qwen3-4B"), plan_model(capsys, "Qwen3-32B")
    opd = ["--use-opd", "--opd-teacher-load", "Qwen3-32B"]
    taught = plan_model(capsys, "Qwen3-4B", *opd)
    assert taught["teachers"] == teacher["weights"]
    assert taught["training"] == plain["training"] + teacher["weights"]
    assert taught["gpus_to_train"]["141"] > plain["gpus_to_train"]["141"]
    both = plan_model(capsys, "Qwen3-4B", *opd, "--opd-teachers", "small", "Qwen3-0.6B")
    assert both["teachers"] == teacher["weights"] + plan_model(capsys, "Qwen3-0.6B")["weights"]
    served = plan_model(capsys, "Qwen3-4B", "--use-opd", "--opd-teacher-urls", "http://h")
    assert served["teachers"] == plan_model(capsys, "Qwen3-4B", *opd[1:])["teachers"] == 0


def test_a_critic_takes_what_the_policy_takes_unless_it_has_a_device_of_its_own(capsys: pytest.CaptureFixture[str]):
    plain, ppo = plan_model(capsys, "Qwen3-4B"), plan_model(capsys, "Qwen3-4B", "--advantage-estimator", "ppo")
    once = plain["weights"] + plain["gradients"] + plain["optimizer"]
    assert plain["critic"] == 0 and ppo["critic"] == pytest.approx(once, rel=1e-5)
    apart = plan_model(capsys, "Qwen3-4B", "--advantage-estimator", "ppo", "--critic-device", "cuda:1")
    assert apart["critic"] == 0 and apart["training"] == plain["training"]
    charged = plan_model(capsys, "Qwen3-4B", "--advantage-estimator", "ppo", "--kl-coef", "0.1")
    assert charged["reference"] == plain["weights"]


def test_a_recurrent_model_needs_a_state_for_each_sequence(capsys: pytest.CaptureFixture[str]):
    needs = plan_model(capsys, "Qwen3-Next-80B-A3B")
    assert needs["state_per_sequence"] == 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    assert needs["kv_per_token"] == 12 * 2 * 2 * 256 * 2


@pytest.mark.parametrize("name", load_known_models())
def test_every_published_model_is_told_of_in_a_page(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", name.lower()]) == 0
    out = capsys.readouterr().out
    assert "B parameters" in out and "to train     " in out and "at least " in out and len(out.splitlines()) < 16


def test_a_folder_or_a_config_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(load_known_models()["Qwen3-0.6B"]))
    named, folder, file = (
        plan_model(capsys, model) | {"name": "", "source": ""}
        for model in ("Qwen3-0.6B", str(tmp_path), str(tmp_path / "config.json"))
    )
    assert named == folder == file


def test_what_is_no_model_is_refused_with_its_neighbours(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "Qwen3-33B"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("miles: Qwen3-33B is not a recipe, a folder with a config.json or a known published model")
    assert "did you mean Qwen3-32B" in said
    assert main(["plan", "Qwen3-8B", "--lr-decay", "3"]) == 2


def test_needs_are_told_without_loading_torch():
    code = "import sys; from miles.launch.main import main; main(['plan', 'Kimi-K2']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_the_needs_with_gradient_checkpointing_are_shown_too(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "Qwen3-30B-A3B"]) == 0
    plain, checkpointed = capsys.readouterr().out.splitlines()[-2:]
    assert "83 of 141 GB" in plain
    assert checkpointed.split()[:2] == ["with", "--gradient-checkpointing"] and "5 of 141 GB" in checkpointed
