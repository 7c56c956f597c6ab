"""The bridge from words to a frozen config, on a small house of its own."""

import shlex
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config.cli import is_flag, parse, split_argv
from miles.config.files import Layer
from miles.config.help import format_help
from miles.config.option import option, passthrough
from miles.config.provenance import flatten_values, to_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Kitchen:
    """Where it is hot."""

    heat: float = option(1.0, "How hot it is.")
    pots: int = option(2, "How many pots there are.", unit="pots", aliases=("--pans",))
    lid: bool = option(False, "Put the lid on.")
    salt: bool = option(True, "Add salt.", off="--without-salt")
    stir: bool | None = option(None, "Stir, or do not, or let the cook decide.")
    style: Literal["slow", "fast", "raw"] = option("slow", "How to cook.")
    timer: int | None = option(None, "When to ring.", unit="minutes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pantry:
    """What there is."""

    jars: tuple[int, ...] = option((), "Sizes of the jars.")
    labels: tuple[str, ...] | None = option(None, "What is written on them.")
    extra: dict[str, Any] = option(factory=dict, help="JSON of what else there is.")
    buffer: str | None = option(None, "The folder it is in.", path=True)
    books: tuple[str, ...] = option((), "Names and files.", path="pairs")
    letters: tuple[str, ...] = passthrough("aunt", "Flags for the aunt.")


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """Two rooms."""

    kitchen: Kitchen
    pantry: Pantry


def read(line: str, *files: dict[str, Any]) -> House:
    reading = parse(House, shlex.split(line), layers(*files))
    assert reading.problems == ()
    assert reading.config is not None
    return reading.config


def layers(*files: dict[str, Any]) -> list[Layer]:
    return [Layer(label=f"f{i}.toml", values=values) for i, values in enumerate(files)]


def problems(line: str, *files: dict[str, Any]) -> tuple[str, ...]:
    return parse(House, shlex.split(line), layers(*files)).problems


def test_every_kind_of_value_is_read():
    house = read(
        "--heat -1e-5 --pots=3 --lid --without-salt --no-stir --style fast --timer 5 --jars 1 -2 3 "
        """--labels -1 "a b" --extra '{"x": [1, -2]}' --buffer=--odd --books one a.txt two b.txt"""
    )
    assert house.kitchen == Kitchen(heat=-1e-5, pots=3, lid=True, salt=False, stir=False, style="fast", timer=5)
    assert house.pantry.jars == (1, -2, 3) and house.pantry.labels == ("-1", "a b")
    assert house.pantry.extra == {"x": [1, -2]} and house.pantry.buffer == "--odd"


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        read("").kitchen.heat = 2.0  # pyright: ignore


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--pans 4", "pots", 4),
        ("--salt", "salt", True),
        ("--no-salt", "salt", False),
        ("--stir", "stir", True),
        ("", "stir", None),
        ("--no-timer", "timer", None),
        ("--no-jars", "jars", ()),
        ("--no-labels", "labels", None),
        ("--heat 3", "heat", 3.0),
        ("--heat=-.5", "heat", -0.5),
        ("--lid --lid", "lid", True),
        ("--pots 3 --pans 3", "pots", 3),
    ],
)
def test_a_knob_has_several_spellings(line: str, name: str, value: Any):
    assert (
        flatten_values(read(line, {"timer": 9, "jars": [1], "labels": ["x"]} if "no-" in line else {}))[name] == value
    )


def test_later_wins_and_origins_tell_who():
    reading = parse(House, ["--pots", "9"], layers({"heat": 2, "pots": 3}, {"kitchen": {"heat": 4.5}}))
    assert reading.config is not None
    assert (reading.config.kitchen.heat, reading.config.kitchen.pots) == (4.5, 9)
    assert [reading.origins[name] for name in ("heat", "pots", "timer")] == ["f1.toml", "flag", "default"]


def test_an_exponent_that_yaml_reads_as_text_is_a_number():
    assert [read("", {"heat": text}).kitchen.heat for text in ("1e-6", "-3E+2", "5e3")] == [1e-6, -300.0, 5000.0]


def test_mail_is_delivered_unopened():
    reading = parse(House, shlex.split("--aunt-tea 2 --aunt-cups 1 -2 --pots 3 --aunt-milk"))
    assert reading.config is not None and reading.problems == ()
    assert reading.config.pantry.letters == ("--tea", "2", "--cups", "1", "-2", "--milk")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--pot 3", "--pot is not a flag; did you mean --pots?"),
        ("-pots 3", "-pots is not a flag; did you mean --pots?"),
        ("--zzzzzz", "--zzzzzz is not a flag; see --help all."),
        ("--pots x", "--pots takes a whole number, not 'x'."),
        ("--pots 3.0", "--pots takes a whole number, not '3.0'."),
        ("--pots 3 4", "--pots takes one value, but was given 2: 3 4."),
        ("--pots", "--pots needs a value: a whole number."),
        ("--pots --lid", "--pots needs a value: a whole number."),
        ("--pots ''", "--pots was given an empty value, but takes a whole number (is a shell variable unset?)."),
        ("--buffer=", "--buffer was given an empty value, but takes text (is a shell variable unset?)."),
        ("--heat warm", "--heat takes a number, not 'warm'."),
        ("--heat nan", "--heat takes a number, not 'nan'."),
        ("--heat -inf", "--heat takes a number, not '-inf'."),
        ("--lid yes", "--lid takes no value, but was given 'yes'."),
        ("--lid=false", "--lid takes no value, but was given 'false'."),
        ("--no-lid 1", "--no-lid takes no value, but was given '1'."),
        ("--without-salt 1", "--without-salt takes no value, but was given '1'."),
        ("--style fats", "--style takes one of slow, fast, raw, not 'fats'; did you mean fast?"),
        ("--style 7", "--style takes one of slow, fast, raw, not '7'."),
        ("--jars 1 b", "--jars takes whole numbers, not 'b'."),
        ("--jars", "--jars needs a value: whole numbers."),
        ("--extra {", "--extra takes a JSON object like '{\"key\": 1}', not '{'."),
        ("--extra [1]", "--extra takes a JSON object like '{\"key\": 1}', not '[1]'."),
        ("--no-heat", "--no-heat is not a flag; did you mean --heat?"),
        ("word", "'word' is not expected here: values follow their flag, as in --lr 1e-6."),
    ],
)
def test_a_wrong_word_is_told_in_one_sentence(line: str, says: str):
    assert problems(line) == (says,)


def test_the_last_of_repeated_flags_wins():
    found = parse(House, ["--pots", "1", "--pots", "2", "--lid", "--no-lid", "--without-salt", "--salt"])
    assert found.problems == () and found.config is not None
    assert (found.config.kitchen.pots, found.config.kitchen.lid, found.config.kitchen.salt) == (2, False, True)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ({"pot": 3}, "f0.toml: pot is not a key; did you mean pots?"),
        ({"kitchen": {"pot": 3}}, "f0.toml: pot is not a key; did you mean pots?"),
        ({"qqqqqqq": 3}, "f0.toml: qqqqqqq is not a key; see miles train --help all."),
        ({"kitchn": {"pots": 3}}, "f0.toml: there is no section [kitchn]; did you mean [kitchen]?"),
        ({"zzzzzz": {"pots": 3}}, "f0.toml: there is no section [zzzzzz]; there are [kitchen], [pantry]."),
        ({"pantry": {"pots": 3}}, "f0.toml: pots belongs in [kitchen], not in [pantry]."),
        ({"kitchen": 3}, "f0.toml: kitchen is a section and holds keys of its own, as in [kitchen]."),
        ({"pots": 3, "kitchen": {"pots": 3}}, "f0.toml: pots is set twice, at the top and in [kitchen]; keep one."),
        ({"pots": "3"}, "f0.toml: pots takes a whole number, not the text '3'."),
        ({"pots": 3.5}, "f0.toml: pots takes a whole number, not 3.5."),
        ({"pots": True}, "f0.toml: pots takes a whole number, not true."),
        ({"pots": None}, "f0.toml: pots takes a whole number, not null."),
        ({"pots": [3]}, "f0.toml: pots takes a whole number, not a list."),
        ({"heat": "warm"}, "f0.toml: heat takes a number, not the text 'warm'."),
        ({"heat": "1"}, "f0.toml: heat takes a number, not the text '1'."),
        ({"heat": True}, "f0.toml: heat takes a number, not true."),
        ({"heat": float("inf")}, "f0.toml: heat takes a number, not inf."),
        ({"lid": "true"}, "f0.toml: lid takes true or false, not the text 'true'."),
        ({"lid": 1}, "f0.toml: lid takes true or false, not 1."),
        ({"style": "fastt"}, "f0.toml: style takes one of slow, fast, raw, not 'fastt'; did you mean fast?"),
        ({"jars": 3}, "f0.toml: jars takes whole numbers in brackets, not 3."),
        ({"jars": [3, "4"]}, "f0.toml: jars takes whole numbers, not the text '4'."),
        ({"extra": 3}, "f0.toml: extra takes a JSON object like '{\"key\": 1}', not 3."),
        ({"buffer": ""}, "f0.toml: buffer is empty, but takes text."),
        ({"without_salt": True}, "f0.toml: without_salt is not a key; write salt = false instead."),
        ({"pans": 2}, "f0.toml: pans is not a key; write pots = ... instead."),
    ],
)
def test_a_wrong_key_is_told_in_one_sentence_with_its_file(file: dict[str, Any], says: str):
    assert problems("", file) == (says,)


def test_all_problems_are_told_at_once_and_what_could_not_be_read_is_named():
    reading = parse(House, shlex.split("--pots x --heta 3 --timer --style raw"), layers({"jar": [1]}))
    assert len(reading.problems) == 4
    assert reading.invalid == {"pots", "heat", "timer", "jars"}
    assert reading.config is not None and reading.config.kitchen.style == "raw"


def test_a_flag_no_one_owns_may_be_explained():
    reading = parse(House, ["--oven", "3"], layers({"grill": 1}), lambda flag: f"[{flag}] is next door")
    assert reading.problems == ("f0.toml: grill [--grill] is next door.", "--oven [--oven] is next door.")


def test_a_knob_without_default_is_required():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Door:
        key: int = option(help="What opens it.")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Hut:
        door: Door

    Hut.__annotations__["door"] = Door
    assert parse(Hut, []).problems == ("--key is required: What opens it.",)
    assert parse(Hut, ["--key", "x"]).problems == ("--key takes a whole number, not 'x'.",)
    assert parse(Hut, ["--key", "x"]).config is None


def test_paths_in_a_file_are_relative_to_it_and_others_to_where_one_stands():
    layer = Layer(label="deep/er/f.toml", values={"buffer": "../s", "books": ["one", "a.txt", "two", "/b.txt"]})
    reading = parse(House, [], [layer])
    assert reading.config is not None
    assert reading.config.pantry.buffer == "deep/s"
    assert reading.config.pantry.books == ("one", "deep/er/a.txt", "two", "/b.txt")
    assert read("--buffer ../s").pantry.buffer == "../s"


@given(st.lists(st.text(min_size=1).filter(lambda w: not is_flag(w)), min_size=1))
def test_words_that_are_no_flags_are_values_as_they_stand(words: list[str]):
    reading = parse(House, ["--labels", *words])
    assert reading.config is not None and reading.config.pantry.labels == tuple(words)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_reads_as_itself_after_a_flag(number: float):
    assert split_argv(["--heat", repr(number)])[1][0].words == (repr(number),)
    reading = parse(House, ["--heat", repr(number)])
    assert reading.config is not None and reading.config.kitchen.heat == number


def test_help_shows_every_flag_with_its_sentence_and_default():
    text = format_help(House, width=100)
    for part in (
        "[kitchen] Where it is hot.",
        "--pots, --pans POTS",
        "How many pots there are. (default: 2)",
        "Add salt. (default: on; --without-salt turns it off)",
        "(default: unset; --no-stir turns it off)",
        "--style {slow,fast,raw}",
        "--jars N ...",
        "--extra JSON",
        "--buffer PATH",
        "--books NAME PATH ...",
    ):
        assert part in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


texts = st.text(min_size=1).filter(lambda t: t.isprintable() or "\n" in t)
houses = st.builds(
    House,
    kitchen=st.builds(
        Kitchen,
        heat=st.floats(allow_nan=False, allow_infinity=False),
        pots=st.integers(-(2**40), 2**40),
        lid=st.booleans(),
        salt=st.booleans(),
        stir=st.none() | st.booleans(),
        style=st.sampled_from(["slow", "fast", "raw"]),
        timer=st.none() | st.integers(0, 99),
    ),
    pantry=st.builds(
        Pantry,
        jars=st.lists(st.integers(0, 9)).map(tuple),
        labels=st.none() | st.lists(texts).map(tuple),
        extra=st.dictionaries(texts, st.none() | st.booleans() | texts | st.integers(0, 9)),
        buffer=st.none() | st.sampled_from(["/a", "/b/c"]),
        letters=st.just(()),
    ),
)


@given(houses)
def test_a_written_config_reads_back_as_itself(house: House):
    import tomllib

    written = to_toml(house, dict.fromkeys(flatten_values(house), "flag"))
    layer = Layer(label="c.toml", values=tomllib.loads(written))
    reading = parse(House, [], [layer])
    assert reading.problems == () and reading.config == house
