"""The table of hook points: every row has a door, a knob, and an error that shows what to write."""

from pathlib import Path

import pytest

from miles.config.schema import flag_from_name, get_options
from miles.core.errors import HookError
from miles.core.protocols import Source
from miles.hooks.load import check_object, format_signature
from miles.hooks.registry import DATA_SOURCE, HOOK_POINTS, POST_WRITE, REWARD, HookPoint
from miles.launch.config import Config


def name_of(point: HookPoint) -> str:
    return f"{point.flag}:{point.protocol_name}"


@pytest.mark.parametrize("point", HOOK_POINTS, ids=name_of)
def test_every_point_has_a_flag_that_takes_an_address(point: HookPoint):
    assert flag_from_name(point.option) == point.flag
    assert get_options(Config)[point.option].value_type.optional or point.builtins
    assert point.when and point.default


@pytest.mark.parametrize("point", HOOK_POINTS, ids=name_of)
def test_what_does_not_fit_is_refused_with_the_signature_to_write(point: HookPoint, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def wrong(a, b, c, d, e, f, g):\n    return None\n")
    with pytest.raises(HookError) as raised:
        point.load(f"{tmp_path / 'mine.py'}:wrong")
    assert str(raised.value).startswith(f"{point.flag} {tmp_path / 'mine.py'}:wrong takes (a, b, c, d, e, f, g), but ")
    assert f"{point.protocol_name} wants {format_signature(point.protocol())}" in str(raised.value)
    with pytest.raises(HookError, match="wants"):
        point.check(f"{tmp_path / 'mine.py'}:wrong")


def test_a_check_makes_no_instance(tmp_path: Path):
    (tmp_path / "made.py").write_text(
        "MADE = []\n"
        "class Score:\n"
        "    def __init__(self):\n        MADE.append(1)\n"
        "    async def __call__(self, prompt, trajectory):\n        return None\n"
        "class Wrong:\n"
        "    def __init__(self):\n        MADE.append(1)\n"
        "    async def __call__(self, prompt):\n        return None\n"
    )
    REWARD.check(f"{tmp_path / 'made.py'}:Score")
    with pytest.raises(HookError, match="RewardFn wants async def"):
        REWARD.check(f"{tmp_path / 'made.py'}:Wrong")
    assert not REWARD.load(f"{tmp_path / 'made.py'}:Score").__call__.__globals__["MADE"][1:]


def test_a_class_with_state_is_an_instance_and_a_maker_stays_a_class(tmp_path: Path):
    (tmp_path / "classes.py").write_text(
        "class Told:\n    def __call__(self, version, weights):\n        pass\n"
        "class Made:\n    def __init__(self, prompts):\n        self.prompts = prompts\n"
    )
    assert not isinstance(POST_WRITE.load(f"{tmp_path / 'classes.py'}:Told"), type)
    assert isinstance(DATA_SOURCE.load(f"{tmp_path / 'classes.py'}:Made"), type)


def test_an_object_has_the_verbs_of_its_door():
    class Lacks:
        def next(self): ...
        def state(self): ...

    class Odd(Lacks):
        def load(self): ...

    class Whole(Lacks):
        def load(self, state): ...

    check_object(Whole(), Source, "--data-source-path x")
    wants = "Source wants next() -> Prompt, state() -> dict[str, Any], load(state: Mapping[str, Any]) -> None"
    for thing, says in ((Lacks(), "without load"), (Odd(), "whose load has too many positional arguments")):
        with pytest.raises(HookError) as raised:
            check_object(thing, Source, "--data-source-path x")
        assert says in str(raised.value) and wants in str(raised.value)
