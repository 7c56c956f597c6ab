"""Tokenizers read from tokenizer.json alone, against those of transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from miles.models import tokenizer_json
from miles.models.tokenizer import HfTokenizer, JsonTokenizer, load_tokenizer
from miles.models.tokenizer_json import read_tokenizer_json, render_template

CORPUS = [
    "Il était une fois 12 cats, who'd say: don't!\n\n  def f(x):\r\n\treturn x ** 2 ",
    "the time in Rome is 10:45 ?",
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- if tools %}\n{{ tools | tojson }}\n{% endif %}{% for m in messages %}\n{% if m.role == 'skip' %}{% continue %}"
    "{% endif %}\n  <|im_start|>{{ m['role'] }}\n{{ m.content | trim }}{{ eos_token }}{{ bos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% if think is defined %}{{ think }}{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": " what <b>is</b> é & 1 < 2 ? "}, {"role": "skip", "content": ""}]


def save_qwen(folder: Path, model_type: str = "qwen3") -> Path:
    """A tokenizer with the pipeline and the files of Qwen3's."""
    tokenizer = Tokenizer(BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(tokenizer_json._QWEN_REGEX), behavior="isolated", invert=False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    added = json.loads(tokenizer.to_str())["added_tokens"]
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
        "additional_special_tokens": list(SPECIAL[1:]),
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def save_generic(folder: Path, model_type: str = "llama") -> Path:
    """The same tokens as a tokenizer of transformers' generic class, with a template in a file of its own."""
    save_qwen(folder, model_type)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))]
    )
    tokenizer.save(str(path))
    config = {
        "backend": "tokenizers",
        "bos_token": "<|im_start|>",
        "clean_up_tokenization_spaces": True,
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


SAVED = [*((save_qwen, each) for each in tokenizer_json._QWEN_MODELS)]
SAVED += [*((save_generic, each) for each in tokenizer_json._GENERIC_MODELS)]


@pytest.fixture(scope="module", params=SAVED, ids=lambda saved: f"{saved[0].__name__}-{saved[1]}")
def pair(request, tmp_path_factory):
    save, model_type = request.param
    folder = save(tmp_path_factory.mktemp("tokenizer"), model_type)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, JsonTokenizer)
    return tokenizer, AutoTokenizer.from_pretrained(folder)


PIECES = st.lists(
    st.sampled_from([*SPECIAL, "<think>", "é", "e\u0301", " don't", "\r\n\n", " 123", "\u200b", " ?", "Ω"])
)
TEXT = st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), PIECES).map(lambda t: t[0].join(t[1]))


@settings(max_examples=examples(40), deadline=None)
@given(text=TEXT)
def test_tokens_and_text_are_those_of_transformers(pair, text):
    tokenizer, oracle = pair
    ids = oracle.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == oracle.decode(ids)
    assert tokenizer.text(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tokenizer.prompt(text) == oracle.encode(text)


def test_sizes_and_special_tokens_are_those_of_transformers(pair):
    tokenizer, oracle = pair
    assert len(tokenizer) == len(oracle)
    assert tokenizer.vocabulary() == oracle.get_vocab()
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (oracle.eos_token_id, oracle.bos_token_id)
    assert tokenizer.chat_template == oracle.chat_template


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"add_generation_prompt": True, "think": False},
        {"tools": [{"type": "function", "function": {"name": "é<f>", "parameters": {}}}]},
        {"bos_token": "B"},
        {"continue_final_message": True},
    ],
)
def test_conversations_render_as_transformers_renders_them(pair, template):
    tokenizer, oracle = pair
    chat = CHAT[:1] if "continue_final_message" in template else CHAT
    assert tokenizer.render_chat_text(chat, **template) == oracle.apply_chat_template(chat, tokenize=False, **template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') }}",
        "{%- set ns = namespace(x=0) -%}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% break %}{% endfor %}"
        "{{ ns.x }}\n",
        "  {% if documents is none and tools is none %}\n    none\n  {% endif %}\n"
        "{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f(1) }}",
    ],
)
def test_the_language_of_templates_is_that_of_transformers(pair, template):
    expected = pair[1].apply_chat_template(CHAT, tokenize=False, chat_template=template)
    assert render_template(template, CHAT, {}) == expected


def _change(folder: Path, name: str, change: dict[str, object]) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize("save", [save_qwen, save_generic])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", {"model_type": "deepseek_v3"}),
        ("config.json", {"auto_map": {"AutoConfig": "a.B"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a.B", None]}}),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("tokenizer_config.json", {"eos_token": "<|new|>"}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<think>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<|im_end|>"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": {"content": "a", "special": True}}}),
        ("tokenizer_config.json", {"fix_mistral_regex": True}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": ""}]}),
        (
            "tokenizer.json",
            {"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}},
        ),
        ("tokenizer.json", {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}),
    ],
)
def test_what_only_transformers_knows_is_left_to_it(tmp_path, save, name, change):
    folder = save(tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert read_tokenizer_json(folder) is not None
    _change(folder, name, change)
    assert read_tokenizer_json(folder) is None


def test_another_pipeline_than_qwens_is_left_to_transformers(tmp_path):
    folder = save_qwen(tmp_path)
    for part in ("normalizer", "decoder", "pre_tokenizer"):
        saved = (folder / "tokenizer.json").read_text()
        _change(folder, "tokenizer.json", {part: None})
        assert read_tokenizer_json(folder) is None
        (folder / "tokenizer.json").write_text(saved)


def test_an_untested_version_of_transformers_reads_its_own_tokenizers(tmp_path, monkeypatch):
    folder = save_qwen(tmp_path)
    monkeypatch.setattr(tokenizer_json, "version", lambda package: "6.0.0")
    assert type(load_tokenizer(folder)) is HfTokenizer


def test_a_tokenizer_is_loaded_without_transformers(tmp_path):
    code = (
        "import sys; from miles.models.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1]);"
        "t.decode(t.apply_chat_template([{'role': 'user', 'content': 'the time'}]));"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(save_qwen(tmp_path))], check=True)
