"""The table of built-in rewards: names, mixtures, packages, and what each row leads to."""

import importlib.util
import inspect
import subprocess
import sys
from importlib import import_module

import pytest

from miles.core.errors import UsageError
from miles.rollout.reward.registry import BOXED, GRADERS, RewardTerm, check_rm_type, is_group_rm, parse_rm_type

ROOM = "miles.rollout.reward."
TAKES = {
    "inline": ["reply", "label", "metadata"],
    "worker": ["reply", "label", "metadata"],
    "math": ["reply", "label"],
    "built": ["context"],
    "group": ["context"],
}


def function_at(address):
    module, _, name = address.partition(":")
    return getattr(import_module(ROOM + module), name)


@pytest.mark.parametrize("name", GRADERS)
def test_every_row_leads_to_a_function_of_its_kind_with_a_sentence(name):
    row = GRADERS[name]
    for address in filter(None, (row.address, row.boxed)):
        function = function_at(address)
        assert list(inspect.signature(function).parameters) == TAKES[row.kind]
        assert (inspect.getdoc(function) or "").split("\n")[0].endswith((".", "?"))


@pytest.mark.parametrize("name", ["exakt", "boxed_", "boxed_random", "boxed_llm_judge", "boxed_boxed_math", "", "f1+"])
def test_an_unknown_name_is_refused_with_the_list(name):
    with pytest.raises(UsageError, match=r"is not a built-in reward; there are exact, contains"):
        check_rm_type(name)


def test_a_near_miss_is_answered_with_a_hint():
    with pytest.raises(UsageError, match=r"did you mean exact\?$"):
        check_rm_type("exakt")


@pytest.mark.parametrize("name", [*GRADERS, *(BOXED + name for name, row in GRADERS.items() if row.boxable)])
def test_every_name_is_known(name):
    if name == "lm_eval" and importlib.util.find_spec("lm_eval") is None:
        with pytest.raises(UsageError, match=r"install it with pip install 'miles-rl\[lm-eval\]'"):
            check_rm_type(name)
        return
    check_rm_type(name)


def test_a_mixture_is_names_and_weights():
    assert parse_rm_type("math:0.9+json_schema:0.1") == (RewardTerm("math", 0.9), RewardTerm("json_schema", 0.1))
    assert parse_rm_type(" math + boxed_f1:-2 ") == (RewardTerm("math", 1.0), RewardTerm("boxed_f1", -2.0))
    assert is_group_rm("math+llm_judge:0.1") and not is_group_rm("math")


@pytest.mark.parametrize(
    ("rm_type", "complaint"),
    [
        ("math:x", "the weight of math is 'x', which is not a number"),
        ("math:", "the weight of math is '', which is not a number"),
        ("math:nan", "the weight of math must be finite"),
        ("math+f1+math", "names math twice"),
    ],
)
def test_a_mixture_that_does_not_add_up_is_refused(rm_type, complaint):
    with pytest.raises(UsageError, match=complaint):
        check_rm_type(rm_type)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "math",
            "--rm-type math needs the package math-verify; install it with pip install 'miles-rl[graders]', or use "
            "math_exact, which compares notation and rational values.",
        ),
        (
            "reasoning_gym",
            "--rm-type reasoning_gym needs the package reasoning-gym; install it with pip install 'miles-rl[graders]'.",
        ),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch, name, sentence):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UsageError) as caught:
        check_rm_type(f"exact+{name}")
    assert str(caught.value) == sentence
    check_rm_type("exact+math_exact")


def test_a_grader_s_packages_are_loaded_only_when_it_is_chosen():
    code = (
        "import sys, miles.rollout.reward.mixture as mixture, miles.rollout.reward.build\n"
        "from miles.rollout.reward.context import GraderContext\n"
        "mixture.build_builtin_reward('math+regex+json_schema+reasoning_gym+ifbench', GraderContext())\n"
        "print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "math_verify", "sympy", "reasoning_gym", "jsonschema", "httpx", "matplotlib"}
    assert not heavy & set(run.stdout.split())


def test_what_runs_in_a_worker_needs_no_torch():
    code = "import sys, httpx\nfrom miles.rollout.reward import reasoning_gym, schema, symbolic\n"
    run = subprocess.run(
        [sys.executable, "-c", code + "print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers"} & set(run.stdout.split())
