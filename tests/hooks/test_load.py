"""From a name to a callable that fits its door."""

import sys
from pathlib import Path

import pytest

from miles.core.errors import HookError
from miles.core.protocols import Filter, Generate, RewardFn
from miles.hooks.load import format_signature, load_hook
from miles.hooks.registry import FILTER, GENERATE, GROUP_REWARD, HOOK_POINTS, REWARD
from miles.models.model_provider import ModelProvider

HERE = Path(__file__).parent
REWARD_WANTS = "RewardFn wants async def (prompt: Prompt, trajectory: Trajectory) -> Reward"


@pytest.fixture(autouse=True)
def hooks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.mark.parametrize(
    "name", ["reward", "reward_with_default", "reward_of_anything", "Scorer", "scorer", "partial", "Buffer.reward"]
)
def test_what_can_be_called_like_the_door_fits(name: str):
    assert callable(load_hook(f"hooks_to_load:{name}", RewardFn))


def test_both_spellings_of_an_address_are_the_same_hook():
    assert load_hook("hooks_to_load.reward", RewardFn) is load_hook("hooks_to_load:reward", RewardFn)


def test_a_class_gives_its_instance():
    assert type(load_hook("hooks_to_load:Scorer", RewardFn)).__name__ == "Scorer"


def test_a_file_is_an_address_and_is_read_once():
    path = str(HERE / "hooks_to_load.py")
    assert load_hook(f"{path}:reward", RewardFn) is load_hook(f"{path}:reward", RewardFn)


def test_a_module_where_one_stands_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "standing_here.py").write_text("async def f(prompt, trajectory): return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert callable(load_hook("standing_here:f", RewardFn))


@pytest.mark.parametrize(
    ("path", "door", "says"),
    [
        ("hooks_to_load:too_many", RewardFn, f"takes (prompt, trajectory, extra), but {REWARD_WANTS}."),
        ("hooks_to_load:too_few", RewardFn, f"takes (prompt), but {REWARD_WANTS}."),
        ("hooks_to_load:keyword_only", RewardFn, f"takes (prompt, trajectory, *, scale), but {REWARD_WANTS}."),
        ("hooks_to_load:not_async", RewardFn, f"is a plain function, but {REWARD_WANTS}; write async def."),
        (
            "hooks_to_load:keep_async",
            Filter,
            "is async, but Filter wants def (group: Group) -> FilterResult; drop its async.",
        ),
        (
            "hooks_to_load:model_provider",
            ModelProvider,
            "whose optional parameter pre_process would be given the model; ModelProvider wants def (model: CausalLM)",
        ),
        ("hooks_to_load:NUMBER", RewardFn, f"is a int, which cannot be called; {REWARD_WANTS}."),
        ("hooks_to_load:NotCallable", RewardFn, f"is a NotCallable, which cannot be called; {REWARD_WANTS}."),
        (
            "hooks_to_load:NeedsArguments",
            RewardFn,
            "is a class whose constructor needs arguments (missing a required argument: 'scale'); give them defaults.",
        ),
        ("hooks_to_load:rewrad", RewardFn, ": hooks_to_load has no rewrad; did you mean reward?"),
        ("hooks_to_load:zzz", RewardFn, ": hooks_to_load has no zzz."),
        ("nowhere.at_all:x", RewardFn, ": there is no module nowhere on the path or in"),
        ("missing.py:x", RewardFn, ": there is no file missing.py."),
        ("word", RewardFn, "is not a built-in; a hook of your own is package.module:name."),
        (":x", RewardFn, "is not an address; write package.module:name."),
        ("a:b c", RewardFn, "is not an address; write package.module:name."),
    ],
)
def test_what_does_not_fit_is_refused_with_the_signature_that_would(path: str, door: type, says: str):
    with pytest.raises(HookError) as raised:
        load_hook(path, door, flag="--the-flag")
    assert str(raised.value).startswith(f"--the-flag {path}")
    assert says in str(raised.value)


def test_a_module_that_breaks_when_imported_is_told_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_one.py").write_text("import no_such_thing\n")
    (tmp_path / "broken_two.py").write_text("1 / 0\n")
    (tmp_path / "broken_three.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HookError, match="broken_one imports no_such_thing, which is not installed"):
        load_hook("broken_one:f", RewardFn)
    with pytest.raises(HookError, match="broken_two fails when imported, with ZeroDivisionError: division by zero"):
        load_hook("broken_two:f", RewardFn)
    with pytest.raises(HookError, match="broken_three fails when imported, with SyntaxError"):
        load_hook("broken_three:f", RewardFn)


def test_the_built_ins_of_every_point_fit_their_door():
    assert [point.load(name) for point in HOOK_POINTS for name in point.builtins]


def test_a_built_in_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(HookError) as raised:
        FILTER.load("nonzero_sdt")
    assert str(raised.value) == (
        "--dynamic-sampling-filter-path nonzero_sdt is not a built-in (there are nonzero_std, keep_all); "
        "did you mean nonzero_std?"
    )


def test_where_upstream_had_a_built_in_still_leads_to_it():
    former = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    assert FILTER.load(former) is FILTER.load("nonzero_std")


def test_points_name_their_doors():
    assert GENERATE.protocol() is Generate and REWARD.protocol() is RewardFn and FILTER.protocol() is Filter
    assert GROUP_REWARD.protocol().__name__ == "GroupRewardFn"


def test_a_door_is_shown_as_one_would_write_it():
    expected = "async def (prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory"
    assert format_signature(Generate) == expected
