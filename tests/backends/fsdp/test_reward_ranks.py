"""Reward models over ranks train like those of one process, whole and with adapters, in every parallel layout."""

import pytest
import torch
from tests.backends.fsdp.reward_ranks import one_reward_model, reward_models
from tests.backends.fsdp.test_fsdp_model import relative
from tests.backends.fsdp.test_lora_ranks import FOUR, TWO, folder_of
from tests.pool import ranks
from tests.train.test_preference import pairs
from transformers import AutoModelForSequenceClassification

CASES = [
    ("qwen3", ("fsdp", "tp", "tp+sp", "cp"), "weights"),
    ("qwen3 moe", ("ep", "tp+sp"), "weights"),
    ("qwen3", ("fsdp", "tp", "tp+sp", "cp"), "plain"),
    ("qwen3 moe", ("ep", "tp"), "plain"),
    ("qwen3", ("tp+sp",), "dora"),
    ("qwen3", ("tp",), "dropout"),
]


def check(tmp_path, kind, layouts, form, count):
    folder, batch, kept = folder_of(kind, tmp_path), tuple(pairs(3)), tmp_path / "kept"
    for number in range(len(layouts)):
        (kept / str(number)).mkdir(parents=True)
    wanted = one_reward_model(folder, batch, form)
    for reported in ranks(count, reward_models, folder, layouts, batch, form, str(kept)):
        for layout, found in zip(layouts, reported, strict=True):
            for name in ("loss", "grad_norm", "rm_accuracy"):
                assert found["metrics"][name] == pytest.approx(wanted["metrics"][name], rel=1e-4), (layout, name)
            assert found["after"].keys() == wanted["after"].keys()
            apart = {n: relative(found["after"][n], wanted["after"][n]) for n in wanted["after"]}
            assert max(apart.values()) < 1e-4, (layout, max(apart, key=lambda n: apart[n]), max(apart.values()))
            assert found["resumed"], layout
    return kept


@pytest.mark.parametrize(("kind", "layouts", "form"), CASES)
def test_a_reward_model_over_two_ranks_trains_like_that_of_one_and_resumes_to_the_bit(tmp_path, kind, layouts, form):
    check(tmp_path, kind, [TWO[name] for name in layouts], form, 2)


def test_a_reward_model_over_four_ranks_is_transformers_classifier(tmp_path):
    kept = check(tmp_path, "qwen3 moe", [FOUR["tp+sp x fsdp"]], "weights", 4)
    theirs = AutoModelForSequenceClassification.from_pretrained(kept / "0", num_labels=1, dtype=torch.float32)
    assert theirs.score.weight.abs().sum() > 1
