"""Tasks of reasoning_gym as data: read from one line, the same in every process, scored by their own scorer."""

import json
import os
import subprocess
import sys

import pytest

from miles.core.errors import DataError, UsageError
from miles.rollout.data import procedural
from miles.rollout.data.dataset import DatasetSource, read_dataset
from miles.rollout.data.procedural import find_task_problem, is_procedural, parse_task


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("reasoning_gym:leg_counting", {"size": 500, "seed": 0}),
        ("reasoning_gym:leg_counting?size=20&seed=7", {"size": 20, "seed": 7}),
        ("reasoning_gym:maze?size=2&wall_chars=%23&sizes=[1,2]", {"size": 2, "wall_chars": "#", "sizes": [1, 2]}),
        ('reasoning_gym:leg_counting?{"size": 3, "max_animals": 4}', {"size": 3, "seed": 0, "max_animals": 4}),
    ],
)
def test_a_task_and_its_settings_are_read_from_one_word(path, settings):
    task = parse_task(path)
    assert is_procedural(path)
    assert task.settings == {"seed": 0} | settings
    assert task.size == task.settings["size"]
    assert task.rm_type is None


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("reasoning_gym:", "names no task"),
        ("reasoning_gym:leg_counting?size", "what follows the"),
        ('reasoning_gym:leg_counting?{"size"', "what follows the"),
        ("reasoning_gym:leg_counting?size=0", "size must be a whole number from 1 on, and is 0"),
        ("reasoning_gym:leg_counting?size=many", "and is 'many'"),
        ("reasoning_gym:leg_counting?seed=-1", "seed must be a whole number from 0 on"),
        ("reasoning_gym:leg_counting?rm_type=3", "rm_type must be the name of a reward"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(path, complaint):
    with pytest.raises(UsageError, match=complaint):
        parse_task(path)


def test_a_missing_package_is_told_in_one_sentence(monkeypatch):
    monkeypatch.setattr(procedural, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs the package reasoning-gym, .*pip install miles-rl\[graders\]\.$"):
        read_dataset("reasoning_gym:leg_counting?size=2", input_key="input")


def test_a_process_that_fails_says_its_last_word(monkeypatch):
    monkeypatch.setattr(procedural.sys, "executable", "false")
    monkeypatch.setattr(procedural, "find_spec", lambda name: True)
    assert find_task_problem("reasoning_gym:leg_counting?seed=123456") == (
        "reasoning_gym:leg_counting?seed=123456: the process that makes the entries failed (nothing was said)."
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("reasoning_gym:leg_countin", "reasoning_gym has no task leg_countin; did you mean leg_counting?"),
        ("reasoning_gym:leg_counting?max_animal=3", r"no setting max_animal, only .*; did you mean max_animals\?"),
        ("reasoning_gym:leg_counting?min_animals=-1", "does not take these settings"),
    ],
)
def test_what_the_library_does_not_know_is_told_with_a_hint(path, complaint):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=complaint):
        read_dataset(path, input_key="input")


def test_entries_become_prompts_their_own_scorer_can_score():
    gym = pytest.importorskip("reasoning_gym")
    path = "reasoning_gym:leg_counting?size=6&seed=5&max_animals=4&rm_type=reasoning_gym"
    made = gym.create_dataset("leg_counting", size=6, seed=5, max_animals=4)
    whole = read_dataset(path, input_key="unused", label_key="unused")
    assert [p.messages[0]["content"] for p in whole.prompts] == [entry["question"] for entry in made]
    assert [p.id for p in whole.prompts] == list(range(6))
    for prompt in whole.prompts:
        assert prompt.metadata["rm_type"] == "reasoning_gym"
        assert prompt.metadata["source_dataset"] == "leg_counting"
        assert made.score_answer(answer=prompt.label, entry=prompt.metadata["entry"]) == 1.0
        assert prompt.metadata["entry"] == made[prompt.id]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["leg_counting", "word_ladder", "ransom_note"])
def test_every_process_is_given_the_same_prompts(task):
    """Two of these walk through sets: by themselves they would differ with Python's hash seed."""
    pytest.importorskip("reasoning_gym")
    path = f"reasoning_gym:{task}?size=4"
    code = (
        "import json, sys; from miles.rollout.data.dataset import DatasetSource, read_dataset\n"
        "print(json.dumps(DatasetSource(read_dataset(sys.argv[1], input_key='x')).state()))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, path], env={**os.environ, "PYTHONHASHSEED": "77"}, capture_output=True, check=True
    )
    source = DatasetSource(read_dataset(path, input_key="x"))
    source.load(json.loads(other.stdout))


def test_a_slice_of_a_task_is_a_slice_of_its_entries():
    pytest.importorskip("reasoning_gym")
    whole = read_dataset("reasoning_gym:leg_counting?size=6&seed=5", input_key="x")
    part = read_dataset("reasoning_gym:leg_counting?size=6&seed=5@[-4:-1]", input_key="x")
    assert part.prompts == whole.prompts[2:5]
