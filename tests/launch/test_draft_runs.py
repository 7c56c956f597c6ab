"""Runs that train a draft model: the policy is the same without it, and a killed run resumes exactly."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.launch.small_run import flags, miles, write_inputs
from tests.models.draft.mtp_checkpoints import make_reference, save_reference

EAGLE = ("--draft-train", "eagle3", "--draft-lr", "1e-3", "--draft-train-steps", "2")
TRAINER = "miles.train.policy_trainer:PolicyTrainer"
FILES = ("model.safetensors", "optimizer.safetensors")


def read_metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def checkpoint(run: Path, step: int = 4) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def test_a_run_trains_a_draft_resumes_it_and_leaves_the_policy_as_it_is(inputs: Path, tmp_path: Path):
    whole, plain, resumed = tmp_path / "whole", tmp_path / "plain", tmp_path / "resumed"
    exported = tmp_path / "exported-{rollout_id}"
    done = miles("train", *flags(inputs, whole, *EAGLE, "--save-hf", str(exported), steps=4))
    assert done.returncode == 0, done.stderr
    assert miles("train", *flags(inputs, plain, steps=4)).returncode == 0
    killed = miles("train", *flags(inputs, resumed, *EAGLE, steps=4), kill_at=f"{TRAINER}._step:3")
    assert killed.returncode != 0 and not checkpoint(resumed).exists()
    again = miles("train", *flags(inputs, resumed, *EAGLE, steps=4))
    assert again.returncode == 0, again.stderr

    for file in FILES:
        policy = (checkpoint(whole) / file).read_bytes()
        assert policy == (checkpoint(plain) / file).read_bytes(), file
        draft = (checkpoint(whole) / "draft" / file).read_bytes()
        assert draft != (checkpoint(whole, 2) / "draft" / file).read_bytes()
        assert draft == (checkpoint(resumed) / "draft" / file).read_bytes(), file

    losses = [each["draft_loss"] for each in read_metrics(whole) if "draft_loss" in each]
    assert len(losses) == 4 and losses[-1] < losses[0]
    folders = sorted(tmp_path.glob("exported-*/draft"))
    assert folders and sorted(file.name for file in folders[-1].iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((folders[-1] / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] is None
    assert load_file(folders[-1] / "model.safetensors")["fc.weight"].shape[1] == 3 * config["hidden_size"]


SPECULATE = ("--speculative-algorithm", "eagle3", "--disable-speculative-adaptive")
LONG = ("--rollout-max-response-len", "24", "--rollout-temperature", "0.5", "--parity", "exact")


def accept_rates(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    return [row["seconds"]["speculative/accept_rate"] for row in rows if row["kind"] == "train"]


def test_the_engine_drafts_with_the_head_that_the_run_trains(inputs: Path, tmp_path: Path):
    """The policy is bit for bit that of a run without drafts, and the published head drafts better each step."""
    plain, online, frozen = tmp_path / "plain", tmp_path / "online", tmp_path / "frozen"
    drafts = (*SPECULATE, "--speculative-num-draft-tokens", "2")
    assert miles("train", *flags(inputs, plain, *LONG, steps=6)).returncode == 0
    done = miles("train", *flags(inputs, online, *LONG, *EAGLE, *drafts, "--draft-lr", "1e-2", steps=6))
    assert done.returncode == 0, done.stderr
    for file in FILES:
        assert (checkpoint(online, 6) / file).read_bytes() == (checkpoint(plain, 6) / file).read_bytes(), file
    rates = accept_rates(online)
    head = ("--speculative-draft-model-path", str(checkpoint(online, 2) / "draft"))
    done = miles("train", *flags(inputs, frozen, *LONG, *drafts, *head, steps=2))
    assert done.returncode == 0, done.stderr
    assert sum(rates[3:]) > sum(rates[:3])
    assert all(rate > 0 for rate in accept_rates(frozen))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--rollout-backend", "served", "--rollout-num-engines", "2"), id="served"),
        pytest.param(("--rollout-backend", "served", "--update-weight-transport", "disk"), id="from disk"),
        pytest.param(("--actor-num-gpus-per-node", "2"), id="ranks"),
    ],
)
def test_the_head_of_a_run_reaches_engines_elsewhere_and_comes_from_ranks(inputs: Path, tmp_path: Path, more):
    """Policy, head and accepted drafts are those of one process; ranks add gradients in another order."""
    here, there = tmp_path / "here", tmp_path / "there"
    drafts = (*LONG, *EAGLE, *SPECULATE, "--speculative-num-draft-tokens", "2")
    for run, options in ((here, ()), (there, more)):
        done = miles("train", *flags(inputs, run, *drafts, *options, "--draft-lr", "1e-2", steps=2))
        assert done.returncode == 0, done.stderr
    assert accept_rates(here)[0] > 0
    if "served" in more:
        for file in FILES:
            for folder in (Path(), Path("draft")):
                name = folder / file
                assert (checkpoint(here, 2) / name).read_bytes() == (checkpoint(there, 2) / name).read_bytes(), name
        assert accept_rates(there) == pytest.approx(accept_rates(here), abs=0.05)  # arrivals differ
    else:
        heads = [load_file(checkpoint(run, 2) / "draft" / "model.safetensors") for run in (here, there)]
        for name, value in heads[0].items():
            np.testing.assert_allclose(value, heads[1][name], rtol=1e-3, atol=1e-3, err_msg=name)
        assert accept_rates(there) == pytest.approx(accept_rates(here), abs=0.05)


@pytest.mark.parametrize("more", [(), ("--rollout-backend", "served")], ids=["here", "served"])
def test_a_run_of_adapters_trains_a_head_and_is_the_same_to_the_bit(inputs: Path, tmp_path: Path, more):
    plain, online = tmp_path / "plain", tmp_path / "online"
    lora = ("--lora-rank", "4", "--lora-alpha", "8", *more)
    drafts = (*EAGLE, *SPECULATE, "--speculative-num-draft-tokens", "2")
    assert miles("train", *flags(inputs, plain, *LONG, *lora, steps=2)).returncode == 0
    done = miles("train", *flags(inputs, online, *LONG, *lora, *drafts, steps=2))
    assert done.returncode == 0, done.stderr
    for file in (*FILES, "adapter/adapter_model.safetensors"):
        assert (checkpoint(online, 2) / file).read_bytes() == (checkpoint(plain, 2) / file).read_bytes(), file
    assert accept_rates(online)[-1] > 0


def test_mtp_layers_of_a_checkpoint_are_trained_published_to_servers_and_saved(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs")
    own = save_reference(make_reference("mimo", vocab_size=28, eos_token_id=27, pad_token_id=27), inputs)
    drafts = ("--enable-mtp-training", "--draft-lr", "1e-2", "--draft-train-steps", "2")
    drafts += ("--speculative-algorithm", "mtp", "--disable-speculative-adaptive")
    plain, here, served = tmp_path / "plain", tmp_path / "here", tmp_path / "served"
    runs = ((plain, ()), (here, drafts), (served, (*drafts, "--rollout-backend", "served")))
    for run, more in runs:
        done = miles("train", *flags(inputs, run, *LONG, *more, steps=2))
        assert done.returncode == 0, done.stderr
    stored = [load_file(checkpoint(run, 2) / "model.safetensors") for run, _ in runs]
    for name, tensor in stored[1].items():
        assert torch.equal(tensor, stored[2][name]), name
        assert torch.equal(tensor, stored[0][name]) == (name not in own), name
    assert accept_rates(served)[-1] > 0
