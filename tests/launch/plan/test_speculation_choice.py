"""--speculative-algorithm auto: n-gram drafts where a run stays as repeatable as without them, and none elsewhere."""

import json
from pathlib import Path

import pytest
from tests.launch.small_config import furnish

from miles.config.cli import parse
from miles.launch.config import ServeRoot
from miles.launch.plan.drafts import choose_served_speculation, choose_speculation, is_repeatable
from miles.launch.plan.render import as_text
from miles.launch.read_config import read
from miles.models.accounting.known_models import find_known_config


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    (tmp_path / "recurrent").mkdir()
    config = find_known_config("Qwen3-Next-80B-A3B")
    (tmp_path / "recurrent" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("line", "algorithm", "reason"),
    [
        ("", "none", "a resumed run would not repeat the last bits"),
        ("--parity exact", "ngram", "change no bit"),
        ("--parity exact --rollout-backend served", "ngram", "change no bit"),
        ("--max-weight-staleness 1", "ngram", "asynchronous"),
        ("--over-sampling-batch-size 32", "ngram", "asynchronous"),
        ("--device cuda", "ngram", "on a GPU"),
        ("--device cuda --parity exact", "ngram", "change no bit"),
        ("--device cuda --hf-checkpoint recurrent", "none", "recurrent"),
        ("--max-weight-staleness 1 --hf-checkpoint recurrent", "none", "recurrent"),
        ("--max-weight-staleness 1 --rollout-backend sglang", "none", "SGLang has its own"),
    ],
)
def test_drafts_are_chosen_where_a_run_stays_as_repeatable(line: str, algorithm: str, reason: str):
    config, plan, origins = read("plan", ["good.toml", *line.split()])
    choice = choose_speculation(config)
    assert choice.algorithm == algorithm and reason in choice.reason
    assert choice.apply(config.native).drafts == (algorithm == "ngram")
    assert not config.native.drafts
    assert f"drafts     {algorithm}: {choice.reason}" in as_text(config, plan, origins)
    # Without drafts a repeatable run stays one; with them it is one to the bit.
    assert algorithm == "none" or config.models.parity == "exact" or not is_repeatable(config)


@pytest.mark.parametrize(
    ("line", "repeatable"),
    [("", True), ("--device cuda", False), ("--device cuda --parity exact", True), ("--max-weight-staleness 1", False)],
)
def test_only_a_run_with_ordered_sums_has_to_repeat_its_events(line: str, repeatable: bool):
    assert is_repeatable(read("plan", ["good.toml", *line.split()])[0]) == repeatable


@pytest.mark.parametrize("algorithm", ["none", "ngram"])
def test_what_the_user_chose_stays(algorithm: str):
    for line in ("--parity exact", ""):
        config, plan, origins = read("plan", ["good.toml", "--speculative-algorithm", algorithm, *line.split()])
        assert choose_speculation(config) == (algorithm, "")
        assert choose_speculation(config).describe() == ""
        assert "drafts     " not in as_text(config, plan, origins)


@pytest.mark.parametrize(
    ("line", "algorithm"),
    [
        ("", "none"),
        ("--parity exact", "ngram"),
        ("--parity exact --train", "none"),
        ("--parity exact --hf-checkpoint recurrent", "none"),
        ("--speculative-algorithm ngram", "ngram"),
    ],
)
def test_a_server_drafts_where_that_changes_no_bit(line: str, algorithm: str):
    config = parse(ServeRoot, ["--hf-checkpoint", "model", *line.split()]).config
    assert config is not None
    assert choose_served_speculation(config).algorithm == algorithm


def test_the_line_for_the_user_says_what_and_why():
    config, _, _ = read("plan", ["good.toml", "--parity", "exact"])
    assert choose_speculation(config).describe() == (
        "Speculative decoding: n-gram drafts where they pay, because with --parity exact they change no bit "
        "(--speculative-algorithm auto)."
    )
