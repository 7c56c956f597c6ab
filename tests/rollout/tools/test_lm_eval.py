"""Tasks of lm-evaluation-harness as held-out sets: prompts and scores equal those of the package's own evaluator."""

import asyncio
import json

import pytest
from tests.rollout.reward.reward_case import trajectory

from miles.core.errors import DataError, UsageError
from miles.rollout.data import lm_eval as tasks
from miles.rollout.data.dataset import read_dataset
from miles.rollout.data.lm_eval import is_lm_eval, parse_lm_eval
from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.mixture import build_builtin_reward
from miles.rollout.reward.registry import check_rm_type

YAML = """task: sums
dataset_path: json
dataset_kwargs:
  data_files: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}
training_split: train
fewshot_split: train
test_split: test
output_type: {kind}
num_fewshot: 2
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
{choices}
generation_kwargs: {{until: ["Question:", "\\n\\n"]}}
filter_list:
  - name: strict
    filter: [{{function: regex, regex_pattern: "#### (-?[0-9]+)"}}, {{function: take_first}}]
  - name: last
    filter: [{{function: regex, group_select: -1, regex_pattern: "(-?[0-9]+)"}}, {{function: take_first}}]
metric_list:
  - {{metric: {metric}, aggregation: mean, higher_is_better: true}}
"""
REPLIES = ["#### 2", "It is 4.", "#### 5", "6\n\n#### 8", "ten", "12 Question: 1 + 1?"]


@pytest.fixture
def package():
    return pytest.importorskip("lm_eval")


@pytest.fixture
def path(tmp_path):
    for name, numbers in (("train", range(20, 26)), ("test", range(1, 7))):
        rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "tasks"
    folder.mkdir()
    text = YAML.format(folder=tmp_path, kind="generate_until", metric="exact_match", choices="")
    (folder / "sums.yaml").write_text(text)
    choices = "doc_to_choice: ['1', '2']"
    text = YAML.format(folder=tmp_path, kind="multiple_choice", metric="acc", choices=choices).replace("sums", "pick")
    text = text.replace("generation_kwargs", "metadata").replace('"{{answer}}"', "0")
    (folder / "pick.yaml").write_text(text)
    return f"lm_eval:sums?include_path={folder}"


def evaluate_with_package(path):
    """What the package's evaluator asks, and what it reports for our replies."""
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    class Scripted(LM):
        def generate_until(self, requests, **_):
            asked.extend(request.args[0] for request in requests)
            stops = requests[0].args[1]["until"]
            return [min((reply.split(stop)[0] for stop in stops), key=len) for reply in REPLIES]

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    asked: list[str] = []
    manager = TaskManager(include_path=parse_lm_eval(path).include_path)
    found = simple_evaluate(Scripted(), tasks=["sums"], task_manager=manager, bootstrap_iters=0)
    return asked, found["results"]["sums"]


def test_prompts_and_scores_are_those_of_the_package(package, path):
    asked, expected = evaluate_with_package(path)
    dataset = read_dataset(path, input_key="unused")
    assert [prompt.messages[0]["content"] for prompt in dataset.prompts] == asked
    assert [prompt.label for prompt in dataset.prompts] == [str(2 * n) for n in range(1, 7)]
    reward = build_builtin_reward("lm_eval", GraderContext())

    async def grade_all():
        pairs = zip(dataset.prompts, REPLIES, strict=True)
        return [await reward(prompt, trajectory(reply)) for prompt, reply in pairs]

    rewards = asyncio.run(grade_all())
    for key in ("exact_match,strict", "exact_match,last"):
        assert sum(each.parts[key] for each in rewards) / len(rewards) == pytest.approx(expected[key])
    assert [each.value for each in rewards] == [each.parts["exact_match,strict"] for each in rewards]
    assert 0.0 < expected["exact_match,strict"] < expected["exact_match,last"] < 1.0  # the replies tell them apart


def test_settings_change_the_prompts_and_a_slice_takes_some(package, path):
    none = read_dataset(f"{path}&num_fewshot=0@[1:3]", input_key="unused")
    assert [prompt.messages[0]["content"] for prompt in none.prompts] == (
        ["Question: 2 + 2?\nAnswer:", "Question: 3 + 3?\nAnswer:"]
    )
    assert [prompt.id for prompt in none.prompts] == [1, 2]
    assert none.prompts[0].metadata["rm_type"] == "lm_eval"  # whatever the run rewards


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("sums", "summs"), "is not a task of lm-eval; did you mean sums"),
        (("sums", "pick"), r"compares log-likelihoods \(multiple_choice\), and only tasks that generate text"),
        (("sums", "mmlu"), "is a group of tasks"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused(package, path, change, sentence):
    with pytest.raises(DataError, match=sentence):
        read_dataset(path.replace(*change), input_key="unused")


def test_paths_are_parsed_and_mistakes_named():
    assert is_lm_eval("lm_eval:gsm8k") and not is_lm_eval("gsm8k.jsonl")
    task = parse_lm_eval("lm_eval:gsm8k?num_fewshot=3&seed=7")
    assert (task.name, task.num_fewshot, task.seed, task.include_path) == ("gsm8k", 3, 7, None)
    for path, sentence in (
        ("lm_eval:", "names no task"),
        ("lm_eval:gsm8k?shots=3", "shots is not a setting of lm_eval; there are num_fewshot, seed, include_path"),
        ("lm_eval:gsm8k?num_fewshot=-1", "must be a whole number from 0 on, and is '-1'"),
        ("lm_eval:gsm8k?num_fewshot", "what follows the"),
    ):
        with pytest.raises(UsageError, match=sentence):
            parse_lm_eval(path)


def test_a_prompt_of_another_kind_cannot_be_graded(package):
    from miles.rollout.reward.lm_eval import grade
    from miles.rollout.reward.types import BadLabel

    with pytest.raises(BadLabel, match="its metadata has no lm_eval with path and doc_id"):
        grade("5", "5", {})


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(tasks, "find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"needs the package lm-eval, which is not installed; pip"):
        read_dataset("lm_eval:gsm8k", input_key="unused")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"--rm-type lm_eval needs the package lm-eval; .*'miles-rl\[lm-eval\]'"):
        check_rm_type("lm_eval")
