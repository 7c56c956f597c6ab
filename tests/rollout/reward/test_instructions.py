"""The ``ifbench`` and ``ifeval`` rewards: every check with replies that follow it and replies that do not."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.reward.instruction_cases import MORE
from tests.rollout.reward.reward_case import reward, value

from miles.core.errors import DataError
from miles.rollout.reward.ifeval.common import split_sentences, split_words
from miles.rollout.reward.ifeval.linguistic import detect_language
from miles.rollout.reward.ifeval.registry import CHECKS
from miles.rollout.reward.ifeval.verbs import is_verb
from miles.rollout.reward.types import BadLabel

# name, settings, replies that follow, replies that do not
CASES = [
    ("keywords:existence", {"keywords": ["red", "fox"]}, ["A Red fox."], ["A redder fox.", "red"]),
    ("keywords:frequency", {"keyword": "fox", "frequency": 2, "relation": "at least"}, ["fox, Fox"], ["fox foxes"]),
    ("keywords:frequency", {"keyword": "fox", "frequency": 2, "relation": "less than"}, ["fox"], ["fox fox"]),
    ("keywords:forbidden_words", {"forbidden_words": ["but", "no way"]}, ["A butter knot."], ["But.", "No way!"]),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "at least"}, ["Eee"], ["ee"]),
    ("language:response_language", {"language": "de"}, ["Der Hund ist nicht hier."], ["The dog is not here.", "42"]),
    ("language:response_language", {"language": "ja"}, ["私は学生です。"], ["我是学生。"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3.0, "relation": "less than"}, ["one two"], ["one two three"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, ["Hi. You?"], ["Dr. No."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "a *** b ***"], ["a\n\nb", "a"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        ["a\n\nSo, b"],
        ["a\n\nThen so", "so", "a\n\nb\n\nso"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] at [home]"], ["[name] []"]),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\nP.S. x", "Bye\np. s. x"],
        ["Bye", "tips x"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["a\nP.P.S b"], ["a\nP.S b"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n* b", "- a\n  - b"], ["* a", "**a**\n* b"]),
    ("detectable_format:constrained_response", {}, ["My answer is yes."], ["yes", "My answer is yes. Or no."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and **b**"], ["*a*", "** **"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na", "SECTION a SECTION b"],
    ),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": 1}\n```'], ["{a: 1}", 'Here: {"a": 1}']),
    ("detectable_format:title", {}, ["<<Poem of joy>>\nx"], ["<Poem>", "<<>>", "<< >>"]),
    ("combination:two_responses", {}, ["a\n******\nb"], ["a", "a******a", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, ["Say hi. Hi!"], ["Hi! Say hi."]),
    ("startend:start_checker", {"start_phrase": "Once upon"}, ["once upon a time"], ["At once upon"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["So it is. The end.", '"the end."'], ["The end. Really."]),
    ("startend:quotation", {}, ['"All of it."'], ['"Some" of it', '"', "All"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["A BIG cat"],
        ["Big CAT"],
    ),
    ("change_case:english_capital", {}, ["ALL OF IT, 42!"], ["ALL of IT", "42"]),
    ("change_case:english_lowercase", {}, ["all of it, 42!"], ["All of it", "42"]),
    ("punctuation:no_comma", {}, ["a and b"], ["a, b"]),
    (
        "count:word_count_range",
        {"min_words": 5, "max_words": 5},
        ["This message has five words."],
        ["This has four words"],
    ),
    ("count:unique_word_count", {"N": 3}, ["a b c a"], ["a b A b"]),
    ("count:numbers", {"N": 3}, ["1 2 3", "This is 1 number, not 10. It is 3."], ["1 and 3.14", "more than 3: 1 2 3."]),
    ("count:numbers", {"N": 1}, ["just 100,000", "number 7."], ["none", "1. 2 comes next"]),
    ("count:conjunctions", {"small_n": 3}, ["I do not but I will and well yet not"], ["and and and but"]),
    ("count:pronouns", {"N": 3}, ["I saw them and they ran"], ["I saw a fox"]),
    ("count:punctuation", {}, ["Marks: . , ! ? ; : !?"], ["Some punctuation.,?!"]),
    (
        "count:keywords_multiple",
        {"keyword1": "ant", "keyword2": "bee", "keyword3": None},
        ["ant bee Bee"],
        ["ant bee", "ant ant bee bee", "ants bee bee"],
    ),
    ("ratio:stop_words", {"percentage": 50}, ["This message has a high stop word ratio."], ["This is not it at all."]),
    (
        "ratio:overlap",
        {"reference_text": "This is the test.", "percentage": 100},
        ["this is the test"],
        ["that is the test"],
    ),
    ("ratio:sentence_type", {}, ["It is so. Is it? I am not sure."], ["Is it? It is.", "It is so."]),
    ("ratio:sentence_balance", {}, ["It is so. Is it? Yes!"], ["It is so. It is. Is it?"]),
    ("ratio:sentence_words", {}, ["Cats nap. Dogs run. Fish dry."], ["Cats nap. Dogs nap. Fish dry.", "One."]),
    (
        "words:alphabet",
        {},
        ["Be cause dandelions eat freedom.", "Zooming around back."],
        ["Your zoo is very xeric.", "Great finds"],
    ),
    ("words:vowel", {}, ["the eel eek eked out."], ["the eel eek eked.\nyeah.", "aeiou"]),
    ("words:consonants", {}, ["This employs consonant clusters."], ["This does not."]),
    ("words:palindrome", {}, ["abcba " * 10], ["abcba " * 9, "bob " * 20]),
    ("words:prime_lengths", {}, ["We are happy"], ["We fail"]),
    ("words:repeats", {"small_n": 1}, ["a b c"], ["a b A"]),
    ("words:no_consecutive", {}, ["big cats nap"], ["big bad cats"]),
    ("words:last_first", {}, ["I like cats. Cats like me."], ["I like cats. Dogs too."]),
    ("words:paragraph_last_first", {}, ["Cats love cats.\n\nMe and me"], ["Cats love dogs."]),
    (
        "words:keywords_specific_position",
        {"keyword": "cat", "n": 2, "m": 3},
        ["Hi. See the cat."],
        ["See the cat.", "Hi. A cat."],
    ),
    ("words:words_position", {"keyword": "cat"}, ["a cat and cat b"], ["cat a b cat", "x"]),
    ("sentence:keyword", {"word": "cat", "N": 2}, ["Hi. A cat."], ["A cat. Hi.", "A cat."]),
    ("sentence:increment", {"small_n": 1}, ["Cats. Cats nap. Cats nap well."], ["Cats nap. Dogs run."]),
    (
        "sentence:alliteration_increment",
        {},
        ["No alliteration. Some semblance of alliteration. Alliterating across alphabet is interesting."],
        ["No alliteration. Some semblance of alliteration. But not here."],
    ),
    ("format:parentheses", {}, ["(a [b {c (d [e])}])"], ["((()))", "([{([)}]))"]),
    ("format:quotes", {}, ['"He said \'she said "no"\' loudly"'], ["\"a 'b'\""]),
    ("format:options", {"options": "yes/no/maybe"}, ["Yes", "no."], ["Yes, because", "never"]),
    ("format:options", {"options": "red, green or blue"}, ["green"], ["red or green"]),
    ("format:newline", {}, ["one\ntwo\nthree"], ["one two\nthree"]),
    ("format:emoji", {}, ["Hi there 😀. Good 🎉", "Fun! 🎈"], ["Hi there 😀. Good."]),
    ("format:line_indent", {}, ["a\n b\n  c"], ["a\nb", "a\n  b\n c", "a"]),
    ("format:list", {"sep": "!!!"}, ["!!! a\n!!! b"], ["- a\n- b", "!!! a", "!!! a\n!!! b\n- c"]),
    ("format:sub-bullets", {}, ["* a\n  - b\n* c\n  - d"], ["* a\n* b\n  - c", "- a"]),
    ("format:title_case", {}, ["The Art of War"], ["The art of War"]),
    ("format:output_template", {}, ["My Answer: a. My Conclusion: b. Future Outlook: c."], ["My Answer: a."]),
    ("format:no_whitespace", {}, ["oneword\n"], ["two words"]),
    *MORE,
]


@pytest.mark.parametrize(("name", "settings", "follow", "fail"), CASES)
def test_what_follows_and_what_does_not(name, settings, follow, fail):
    for reply in follow:
        assert CHECKS[name](reply, settings), reply
    for reply in fail:
        assert not CHECKS[name](reply, settings), reply


def test_every_check_has_a_case_and_a_sentence():
    assert {name for name, *_ in CASES} == set(CHECKS)
    assert all((inspect.getdoc(check) or "").split("\n")[0].endswith(".") for check in CHECKS.values())


SETTINGS = {name: settings for name, settings, *_ in CASES}


@given(name=st.sampled_from(sorted(CHECKS)), reply=st.text(max_size=200))
def test_no_reply_upsets_a_check(name, reply):
    assert CHECKS[name](reply, SETTINGS[name]) in (True, False)


@pytest.mark.parametrize("name", [n for n in sorted(CHECKS) if SETTINGS[n]])
def test_settings_that_are_missing_are_named(name):
    with pytest.raises(BadLabel, match="an instruction"):
        CHECKS[name]("Some words. And more\n\nof them", {})


def describe_task(*names, **kwargs):
    return {"instruction_id_list": list(names), "kwargs": [kwargs] * len(names)}


def test_all_instructions_must_be_followed_and_the_share_is_told():
    both = describe_task("punctuation:no_comma", "change_case:english_lowercase")
    assert reward("ifbench", "all good", None, metadata=both).parts == {"score": 1.0, "share": 1.0}
    assert reward("ifeval", "Not all good", None, metadata=both).parts == {"score": 0.0, "share": 0.5}
    assert value("ifbench", "Not all good", None, metadata=both) == 0.0


def test_thinking_is_not_read_and_nothing_follows_nothing():
    quiet = describe_task("punctuation:no_comma")
    assert value("ifbench", "<think>well, hm,</think>yes", None, metadata=quiet) == 1.0
    assert value("ifbench", "<think>well, hm</think>  ", None, metadata=quiet) == 0.0
    assert value("boxed_ifbench", r"a, b \boxed{c}", None, metadata=quiet) == 1.0


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({}, "names no instructions"),
        ({"instruction_id_list": []}, "names no instructions"),
        (
            describe_task("punctuation:no_coma"),
            "no check for the instruction punctuation:no_coma; is it punctuation:no_comma?",
        ),
        ({"instruction_id_list": ["format:newline"], "kwargs": [{}, {}]}, "an object for each of the 1"),
        ({"instruction_id_list": ["format:newline"], "kwargs": ["a"]}, "are not an object"),
        (
            describe_task("keywords:frequency", keyword="a", frequency=1, relation="about"),
            "must be one of less than, at least",
        ),
        (
            describe_task("keywords:letter_frequency", letter="ab", let_frequency=1, let_relation="exactly"),
            "counts one letter",
        ),
        (describe_task("language:response_language", language="tlh"), "the known ones are af, ar"),
    ],
)
def test_instructions_that_cannot_be_checked_are_the_data_s_fault(metadata, complaint):
    with pytest.raises(DataError, match=complaint.replace("?", r"\?")):
        value("ifbench", "reply", None, metadata=metadata)


def test_words_and_sentences_are_cut_where_a_reader_would():
    assert split_words("Don't stop: well-being, 3.5!") == ["Don't", "stop", "well-being", "3", "5"]
    assert split_sentences('He said "Go." Then left... Why?! e.g. now') == [
        'He said "Go."',
        "Then left...",
        "Why?!",
        "e.g. now",
    ]
    assert split_sentences("1. First\n\n2. Second") == ["1. First", "2. Second"]
    assert split_sentences("...") == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The cat is on the table and it was not happy with this.", "en"),
        ("El perro está en la casa y no es muy grande.", "es"),
        ("O cão não está em casa e você é mais uma pessoa.", "pt"),
        ("Le chat est dans la maison et il ne veut pas une souris.", "fr"),
        ("Il gatto è nella casa e non sono contento di questo.", "it"),
        ("Кошка была на столе, и это не так же хорошо для них.", "ru"),
        ("Котката е на масата и това не са това, което е за мен.", "bg"),
        ("القط في البيت وهذا هو الذي كان على الطاولة", "ar"),
        ("این گربه در خانه است و برای آن یک کتاب را دارد", "fa"),
        ("यह किताब मेज पर है और वह घर में नहीं है", "hi"),
        ("โต๊ะอยู่ในบ้าน", "th"),
        ("고양이가 집에 있다", "ko"),
        ("வீட்டில் பூனை", "ta"),
        ("Con mèo không có trong nhà và những người này", "vi"),
        ("", None),
    ],
)
def test_languages_are_detected(text, code):
    assert detect_language(text) == code


def test_verbs_are_known_in_every_form():
    forms = split_words("go goes going went gone stop stopped stopping try tried tying die dying use used using")
    assert [form for form in forms if not is_verb(form)] == []
    assert not any(map(is_verb, split_words("happily house the of my blue")))


def test_a_span_that_lies_nowhere_is_the_data_s_fault():
    for numbers in ({"n_start": 3, "n_end": 2}, {"n_start": 0, "n_end": 99}, {"n_start": -1, "n_end": 2}):
        with pytest.raises(BadLabel, match="does not lie within prompt_to_repeat"):
            CHECKS["repeat:repeat_span"]("a", {"prompt_to_repeat": "a b c", **numbers})
    with pytest.raises(BadLabel, match="N must be at least 1"):
        CHECKS["count:words_japanese"]("a", {"N": 0})
