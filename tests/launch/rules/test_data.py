"""Data options: every kind of source is accepted, and an unreadable one is an error before anything starts."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from tests.launch.small_config import furnish
from tests.rollout.dataset_files import write_parts, write_splits

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.config.provenance import flatten_values, to_toml
from miles.launch.config import Config
from miles.launch.plan.plan import build_plan
from miles.launch.rules.check import Command, check_rules
from miles.launch.rules.paths import count_prompts

GYM = "reasoning_gym:leg_counting?size=40"


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    rows = [{"input": str(i), "label": str(i)} for i in range(10)]
    write_parts(tmp_path / "saved", rows, shards=2)
    write_splits(tmp_path / "splits", {"train": rows, "test": rows[:3]})
    (tmp_path / "void").mkdir()
    monkeypatch.chdir(tmp_path)


def list_problems(*flags: str) -> list[str]:
    reading = parse(Config, flags, read_layers("good.toml"))
    return [*reading.problems, *check_rules(reading, "plan")]


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
    monkeypatch.setattr("miles.launch.rules.paths.find_suite_problem", lambda path: None)
    assert list_problems("--prompt-data", *words) == []
    assert (
        list_problems(
            "--eval-interval", "2", "--eval-prompt-data", "held", words[0].partition("*0.")[0].removesuffix("*1")
        )
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
    (problem,) = list_problems("--prompt-data", *words)
    assert problem.startswith(complaint)


def test_a_task_that_cannot_be_generated_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles.launch.rules.paths.find_suite_problem", lambda path: f"{path}: no such task.")
    assert list_problems("--prompt-data", GYM) == [f"--prompt-data {GYM}: no such task."]


def test_a_held_out_set_has_no_weight():
    (problem,) = list_problems("--eval-interval", "2", "--eval-prompt-data", "held", "data/held.jsonl*0.5")
    assert (
        problem == "--eval-prompt-data held data/held.jsonl*0.5 has a weight, but a held-out set is read once, whole."
    )


def test_a_curriculum_wants_groups_in_their_order():
    more = ("--max-weight-staleness", "2", "--reorder-window", "3")
    assert list_problems("--curriculum-path", "unsolved_first") == []
    assert list_problems("--curriculum-path", "unsolved_first", "--max-weight-staleness", "2") == []
    (problem,) = list_problems("--curriculum-path", "unsolved_first", *more)
    assert problem.startswith("--curriculum-path chooses prompts by the results of earlier ones")
    (problem,) = list_problems("--curriculum-path", "unsolved")
    assert problem.endswith("built in are learnable_parts, unsolved_first.")


def test_prompts_are_counted_over_all_entries():
    assert count_prompts(("data/train.jsonl@[:5]", "saved", "splits/train@[-4:]*3", f"{GYM}@[10:]")) == 5 + 10 + 4 + 30
    assert count_prompts(("data/train.jsonl", "void")) == 0
    words = ("--prompt-data", "data/train.jsonl*1", "saved*3", "--no-num-rollout", "--num-epoch", "3")
    config = parse(Config, words, read_layers("good.toml")).config
    assert config is not None
    assert build_plan(config).steps == 3 * 50 // 16


def test_a_recipe_names_one_entry_or_several_and_paths_are_its_own(tmp_path: Path):
    (tmp_path / "recipes").mkdir()
    for written, read in [
        ('"../data/train.jsonl"', ("data/train.jsonl",)),
        (f'["../saved*0.3", "{GYM}*0.7"]', ("saved*0.3", f"{GYM}*0.7")),
    ]:
        (tmp_path / "recipes" / "a.toml").write_text(f"prompt_data = {written}\n")
        config = parse(Config, (), read_layers("recipes/a.toml")).config
        assert config is not None and config.rollout.prompt_data == read
        again = tomllib.loads(to_toml(config, dict.fromkeys(flatten_values(config), "file")))
        here = [word if word.startswith("reasoning_gym:") else os.path.join(tmp_path, word) for word in read]
        assert again["rollout"]["prompt_data"] == here
    (tmp_path / "recipes" / "b.toml").write_text(f'eval_prompt_data = ["held", {json.dumps(GYM)}]\n')
    config = parse(Config, (), read_layers("recipes/b.toml")).config
    assert config is not None and config.rollout.eval_prompt_data == ("held", GYM)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_column_that_the_first_rows_lack_is_told_before_anything_is_loaded(command: Command):
    def find_problems(line: str) -> list[str]:
        return check_rules(parse(Config, line.split(), read_layers("good.toml")), command)

    assert find_problems("--input-key question") == [
        "data/train.jsonl, line 1: there is no column question (found: input, label); name the right one with "
        "--input-key."
    ]
    assert find_problems("--label-key answer --skip-bad-rows") == []
    assert find_problems("--eval-interval 2 --eval-prompt-data held data/held.jsonl --eval-label-key answer") == [
        "data/held.jsonl, line 1: there is no column answer (found: input, label); name the right one with --label-key."
    ]


def test_a_grader_that_compares_needs_the_column_of_the_answer():
    assert list_problems("--no-label-key") == [
        "--rm-type math compares with a reference answer; name its column with --label-key."
    ]
    assert list_problems("--no-label-key", "--rm-type", "deterministic_random") == []
    assert list_problems("--no-label-key", "--no-rm-type", "--custom-rm-path", "a.b:c") == []


def test_a_template_has_a_place_for_the_question_and_a_system_prompt_a_chat():
    assert list_problems("--prompt-template", "Think. {prompt}") == []
    assert list_problems("--prompt-template", "Think.") == [
        "--prompt-template has no {prompt}, the place of the question; put it in."
    ]
    assert list_problems("--system-prompt", "Think.", "--apply-chat-template") == []
    (problem,) = list_problems("--system-prompt", "Think.")
    assert problem.startswith("--system-prompt is a message of a chat; add --apply-chat-template")


def test_text_is_read_from_a_file_and_pinned_in_the_config(tmp_path: Path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "think.txt").write_text("Think in <think>.\n{prompt}\n")
    (tmp_path / "recipes" / "r.toml").write_text('include = "../good.toml"\nprompt_template = "@think.txt"\n')
    found = parse(Config, ["--system-prompt", "@@home"], read_layers("recipes/r.toml"))
    assert found.config is not None and found.problems == ()
    assert found.config.rollout.prompt_template == "Think in <think>.\n{prompt}"
    assert found.config.rollout.system_prompt == "@home"
    (tmp_path / "recipes" / "think.txt").write_text("changed")
    (tmp_path / "pinned.toml").write_text(to_toml(found.config, found.origins))
    again = parse(Config, [], read_layers("pinned.toml")).config
    assert again is not None
    assert again.rollout.prompt_template == found.config.rollout.prompt_template
    assert again.rollout.system_prompt == found.config.rollout.system_prompt
    assert parse(Config, ["--prompt-template", "@nowhere"]).problems == (
        "--prompt-template @nowhere names a file that cannot be read: No such file or directory.",
    )


def test_minimal_commands_need_no_number_of_samples():
    line = ("--hf-checkpoint", "model", "--prompt-data", "data/train.jsonl", "--num-rollout", "1")
    for more, size in (
        (("--rm-type", "math", "--label-key", "label"), 32 * 8),
        (("--loss-type", "sft_loss", "--label-key", "label"), 32),
    ):
        result = parse(Config, [*line, *more])
        assert check_rules(result, "plan") == [] and result.config is not None
        assert build_plan(result.config).samples_per_step == size
