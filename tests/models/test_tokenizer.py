"""A checkpoint's tokenizer, against transformers itself."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.tiny import save_tokenizer
from tests.tiers import examples
from transformers import AutoTokenizer

from miles.core.errors import DataError, UsageError
from miles.models.tokenizer import fingerprint_vocabulary, load_tokenizer

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the time in Rome?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    "template", [{}, {"add_generation_prompt": True}, {"add_generation_prompt": True, "think": False}]
)
def test_a_conversation_renders_as_transformers_renders_it(folder, tokenizer, template):
    oracle = AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False, **template)
    assert tokenizer.apply_chat_template(CONVERSATION, **template) == expected


@settings(max_examples=examples(50), deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_nothing_is_added_to_text_and_special_tokens_are_single_ids(tokenizer):
    assert tokenizer.encode("") == []
    assert tokenizer.encode("<|end|>") == [tokenizer.eos_token_id]
    assert tokenizer.encode("the") == tokenizer.encode("t" + "he")


def test_decode_shows_special_tokens_and_text_hides_them(tokenizer):
    ids = [*tokenizer.encode("in Rome"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "in Rome<|end|>"
    assert tokenizer.text(ids) == "in Rome"


def test_the_length_counts_added_tokens(tokenizer):
    assert len(tokenizer) == max(tokenizer.encode("<|start|><|end|><|pad|>")) + 1


@pytest.mark.parametrize("make", [lambda p: p / "absent", lambda p: p])
def test_a_folder_without_a_tokenizer_is_refused_in_one_sentence(tmp_path, make):
    with pytest.raises(UsageError, match=r"There is no tokenizer in .*--hf-checkpoint\.$"):
        load_tokenizer(make(tmp_path))


def test_a_damaged_tokenizer_is_refused_in_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_in_a_folder_is_not_run_unless_trusted(tmp_path):
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["custom.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "custom.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UsageError, match="--trust-remote-code"):
        load_tokenizer(tmp_path)


def test_a_missing_chat_template_is_named_when_one_is_needed(tmp_path):
    plain = load_tokenizer(save_tokenizer(tmp_path, template=None))
    assert not plain.has_chat_template
    with pytest.raises(UsageError, match="no chat template; leave out --apply-chat-template"):
        plain.apply_chat_template(CONVERSATION)


def test_a_template_that_refuses_a_conversation_says_why(tmp_path):
    strict = load_tokenizer(save_tokenizer(tmp_path, template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(DataError, match="roles must alternate"):
        strict.apply_chat_template(CONVERSATION)


def test_a_template_whose_code_fails_says_how(tmp_path):
    failing = load_tokenizer(save_tokenizer(tmp_path, template="{{ messages[0].content + 1 }}"))
    with pytest.raises(DataError, match="failed on a conversation, with TypeError: can only concatenate str"):
        failing.apply_chat_template(CONVERSATION)


def test_text_with_a_single_surrogate_is_refused_in_one_sentence(tokenizer):
    with pytest.raises(DataError, match="has a lone surrogate, which is no character and cannot be tokenized"):
        tokenizer.encode("time in \ud800")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": 1}'])
def test_the_fingerprint_of_a_damaged_tokenizer_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UsageError, match=r"tokenizer\.json is not a tokenizer"):
        fingerprint_vocabulary(tmp_path)


@pytest.mark.parametrize("change", ["none", "limits", "cleanup", "split", "call with padding"])
def test_tokens_and_text_are_those_of_transformers(tmp_path, change):
    folder = save_tokenizer(tmp_path)
    if change == "limits":  # which transformers does not apply unless asked to
        path = folder / "tokenizer.json"
        limits = {
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": {
                "strategy": {"Fixed": 9},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<|pad|>",
            },
        }
        path.write_text(json.dumps(json.loads(path.read_text()) | limits))
    options = {"cleanup": {"clean_up_tokenization_spaces": True}, "split": {"split_special_tokens": True}}.get(change)
    if options is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | options))
    tokenizer, oracle = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    if change == "call with padding":
        tokenizer.inner(["the", "the time in Rome"], padding=True, pad_to_multiple_of=8)
    for text in ("What is the time , in Rome ?", "", "<|start|>the<|end|>"):
        ids = oracle.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids)
        assert tokenizer.text(ids) == oracle.decode(ids, skip_special_tokens=True)
