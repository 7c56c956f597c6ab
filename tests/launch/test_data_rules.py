"""What may be named as data: every kind is accepted, and what cannot be read is told before anything starts."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from tests.launch.house import furnish
from tests.rollout.written import write_parts, write_splits

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.config.origin import to_toml, values_of
from miles.launch.config import Config
from miles.launch.found import prompts_in
from miles.launch.plan import plan_of
from miles.launch.rules import broken
from miles.rollout import generated

GYM = "reasoning_gym:leg_counting?size=40"


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    rows = [{"input": str(i), "label": str(i)} for i in range(10)]
    write_parts(tmp_path / "saved", rows, shards=2)
    write_splits(tmp_path / "splits", {"train": rows, "test": rows[:3]})
    (tmp_path / "void").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generated, "why_not", lambda path: None)


def told(*flags: str) -> list[str]:
    reading = parse(Config, flags, read_layers("good.toml"))
    return [*reading.problems, *broken(reading, "plan")]


@pytest.mark.parametrize(
    "words",
    [
        ("data/train.jsonl",),
        ("data/train.jsonl", "data/held.jsonl@[5:]"),
        ("data/train.jsonl*0.3", "saved*0.7"),
        ("data",),
        ("data/*.jsonl",),
        ("splits/train",),
        (GYM,),
        (f"{GYM}*1", "data/*.jsonl*2"),
    ],
)
def test_every_kind_of_data_is_accepted(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles.launch.found.why_not", lambda path: None)
    assert told("--prompt-data", *words) == []
    assert (
        told("--eval-interval", "2", "--eval-prompt-data", "held", words[0].partition("*0.")[0].removesuffix("*1"))
        == []
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("data/none*.jsonl",), "--prompt-data data/none*.jsonl matches nothing that is a .jsonl, .parquet or .arrow"),
        (("void",), "--prompt-data void holds no .jsonl, .parquet or .arrow file, and is no saved data set."),
        (("splits",), "--prompt-data splits holds the splits train, test; name one, as in splits/train."),
        (("data/train.jsonl*0", "saved*1"), "The weight of data/train.jsonl must be above 0, and is 0; "),
        (("data/train.jsonl*-2",), "The weight of data/train.jsonl must be above 0, and is -2; "),
        (("data/train.jsonl*2", "saved"), "--prompt-data gives saved no weight and others one; "),
        (("reasoning_gym:leg_counting?size=0",), "reasoning_gym:leg_counting?size=0: size must be a whole number"),
        (("data/train.jsonl", "nowhere.jsonl"), "--prompt-data nowhere.jsonl does not exist"),
    ],
)
def test_what_cannot_be_read_is_told_once(words: tuple[str, ...], complaint: str):
    (problem,) = told("--prompt-data", *words)
    assert problem.startswith(complaint)


def test_a_task_that_cannot_be_generated_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles.launch.found.why_not", lambda path: f"{path}: no such task.")
    assert told("--prompt-data", GYM) == [f"--prompt-data {GYM}: no such task."]


def test_a_held_out_set_has_no_weight():
    (problem,) = told("--eval-interval", "2", "--eval-prompt-data", "held", "data/held.jsonl*0.5")
    assert (
        problem == "--eval-prompt-data held data/held.jsonl*0.5 has a weight, but a held-out set is read once, whole."
    )


def test_a_curriculum_wants_groups_in_their_order():
    more = ("--max-weight-staleness", "2", "--shelf-window", "3")
    assert told("--curriculum-path", "unsolved_first") == []
    assert told("--curriculum-path", "unsolved_first", "--max-weight-staleness", "2") == []
    (problem,) = told("--curriculum-path", "unsolved_first", *more)
    assert problem.startswith("--curriculum-path chooses prompts by what became of earlier ones")
    (problem,) = told("--curriculum-path", "unsolved")
    assert problem.endswith("built in are learnable_parts, unsolved_first.")


def test_prompts_are_counted_over_all_entries():
    assert prompts_in(("data/train.jsonl@[:5]", "saved", "splits/train@[-4:]*3", f"{GYM}@[10:]")) == 5 + 10 + 4 + 30
    assert prompts_in(("data/train.jsonl", "void")) == 0
    words = ("--prompt-data", "data/train.jsonl*1", "saved*3", "--no-num-rollout", "--num-epoch", "3")
    config = parse(Config, words, read_layers("good.toml")).config
    assert config is not None
    assert plan_of(config).steps == 3 * 50 // 16


def test_a_recipe_names_one_entry_or_several_and_paths_are_its_own(tmp_path: Path):
    (tmp_path / "recipes").mkdir()
    for written, read in [
        ('"../data/train.jsonl"', ("data/train.jsonl",)),
        (f'["../saved*0.3", "{GYM}*0.7"]', ("saved*0.3", f"{GYM}*0.7")),
    ]:
        (tmp_path / "recipes" / "a.toml").write_text(f"prompt_data = {written}\n")
        config = parse(Config, (), read_layers("recipes/a.toml")).config
        assert config is not None and config.rollout.prompt_data == read
        again = tomllib.loads(to_toml(config, dict.fromkeys(values_of(config), "file")))
        here = [word if word.startswith("reasoning_gym:") else os.path.join(tmp_path, word) for word in read]
        assert again["rollout"]["prompt_data"] == here
    (tmp_path / "recipes" / "b.toml").write_text(f'eval_prompt_data = ["held", {json.dumps(GYM)}]\n')
    config = parse(Config, (), read_layers("recipes/b.toml")).config
    assert config is not None and config.rollout.eval_prompt_data == ("held", GYM)
