"""Runs with a draft model: the same tokens, log-probs and weights, bit for bit, as without under --parity exact."""

import json

import pytest
from tests.launch.small_run import everything, flags, write_inputs

from miles.launch.main import main

EXACT = ("--parity", "exact", "--use-rollout-routing-replay")


def train(folder, name, *more):
    arguments = flags(folder / "inputs", folder / name, *EXACT, *more, steps=2)
    assert main(["train", *arguments]) == 0
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculative")
    inputs = write_inputs(folder / "inputs", moe=True)
    return {
        "none": train(folder, "none"),
        "draft-model": train(
            folder,
            "draft-model",
            *("--speculative-algorithm", "draft-model", "--speculative-draft-model-path", str(inputs)),
            *("--disable-speculative-adaptive", "--speculative-num-draft-tokens", "2"),
        ),
    }


def test_drafts_of_a_model_change_no_bit_of_an_exact_run(runs):
    expected, found = everything(runs["none"]), everything(runs["draft-model"])
    weights = [name for name in expected if name.endswith(".safetensors")]
    assert weights
    assert {name: found[name] for name in weights} == {name: expected[name] for name in weights}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--speculative-algorithm", "draft-model"], "needs --speculative-draft-model-path"),
        (["--speculative-draft-model-path", "nowhere"], "needs --speculative-algorithm draft-model"),
        (
            ["--speculative-algorithm", "draft-model", "--speculative-draft-model-path", "nowhere"],
            "is not a folder with a config.json",
        ),
    ],
)
def test_a_draft_model_that_cannot_be_used_is_refused_before_anything_starts(tmp_path, capsys, words, sentence):
    inputs = write_inputs(tmp_path / "inputs")
    assert main(["train", *flags(inputs, tmp_path / "run", *words, steps=1)]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path, capsys):
    inputs, other = write_inputs(tmp_path / "inputs"), write_inputs(tmp_path / "other")
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    words = ["--speculative-algorithm", "draft-model", "--speculative-draft-model-path", str(other)]
    assert main(["train", *flags(inputs, tmp_path / "run", *words, steps=1)]) == 2
    assert "another vocabulary" in capsys.readouterr().err
