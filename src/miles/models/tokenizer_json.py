"""tokenizer.json, read by the tokenizers package alone, where transformers would make the same tokenizer of it.

Importing the tokenizer classes of transformers takes longer than importing torch. A folder is read here only if nothing
in it makes transformers change what tokenizer.json says, and only for versions of transformers whose results tests
compare with these; any other folder is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_TESTED_VERSIONS = ("5.17.",)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# Models for which transformers takes the class that tokenizer_config.json names, or the same one.
_GENERIC_MODELS = ("llama", "mixtral", "qwen3", "qwen3_moe", "smollm3")
_QWEN_MODELS = ("qwen3", "qwen3_moe")
# Files that change tokens, or add templates or code.
_OTHER_FILES = (
    "added_tokens.json",
    "special_tokens_map.json",
    "additional_chat_templates",
    "tokenizer.model",
    "tekken.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_PLAIN_OPTIONS = frozenset(
    {
        *_SPECIAL_TOKENS,
        *(f"{name}_id" for name in _SPECIAL_TOKENS),
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "added_tokens_decoder",
        "additional_special_tokens",
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "errors",
        "extra_special_tokens",
        "is_local",
        "legacy",
        "local_files_only",
        "model_input_names",
        "model_max_length",
        "model_type",
        "padding_side",
        "split_special_tokens",
        "tokenizer_class",
    }
)
_QWEN_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerJson:
    """A tokenizer of the tokenizers package, the special tokens by their names, and the chat template."""

    backend: Any
    special_tokens: Mapping[str, str]
    chat_template: str | None

    def find_id(self, name: str) -> int | None:
        """Return the id of a special token by its name, such as ``eos_token``."""
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def read_tokenizer_json(folder: Path) -> TokenizerJson | None:
    """Read the tokenizer of a folder; None where only transformers knows what it is, or says what is wrong with it."""
    try:
        if not version("transformers").startswith(_TESTED_VERSIONS):
            return None
        if any((folder / name).exists() for name in _OTHER_FILES):
            return None
        model, config, tokenizer = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("config.json", "tokenizer_config.json", "tokenizer.json")
        )
        special_tokens = _read_special_tokens(config)
        if not (_is_plain(model, config, tokenizer) and _has_all_tokens(config, tokenizer, special_tokens)):
            return None
        from tokenizers import Tokenizer

        template = _read_template(folder, config)
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return TokenizerJson(backend=backend, special_tokens=special_tokens, chat_template=template)
    except (PackageNotFoundError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    except Exception as error:  # the tokenizers package raises nothing more specific for a damaged file
        if type(error) is Exception:
            return None
        raise


def _is_plain(model: dict[str, Any], config: dict[str, Any], tokenizer: dict[str, Any]) -> bool:
    """Whether the class that transformers takes leaves the tokenizer as tokenizer.json has it."""
    name, kind = config.get("tokenizer_class"), model.get("model_type")
    if not config.keys() <= _PLAIN_OPTIONS or "auto_map" in model or "tokenizer_class" in model:
        return False
    if config.get("split_special_tokens") or config.get("add_prefix_space"):
        return False
    if config.get("backend", "tokenizers") != "tokenizers" or tokenizer["model"].get("type") != "BPE":
        return False
    if tokenizer.get("truncation") is not None or tokenizer.get("padding") is not None:
        return False
    if name in _GENERIC_CLASSES:
        return kind in _GENERIC_MODELS
    return name in _QWEN_CLASSES and kind in _QWEN_MODELS and _is_qwen(tokenizer)


def _is_qwen(tokenizer: dict[str, Any]) -> bool:
    """Whether tokenizer.json says what transformers' class for Qwen sets by itself."""
    bpe, added = tokenizer["model"], tokenizer["added_tokens"]
    split, level = tokenizer["pre_tokenizer"]["pretokenizers"]
    isolated = {"type": "Split", "pattern": {"Regex": _QWEN_REGEX}, "behavior": "Isolated", "invert": False}
    return (
        tokenizer["normalizer"] == {"type": "NFC"}
        and tokenizer["pre_tokenizer"]["type"] == "Sequence"
        and split == isolated
        and (level["type"], level["add_prefix_space"], level["use_regex"]) == ("ByteLevel", False, False)
        and tokenizer["decoder"]["type"] == "ByteLevel"
        and (tokenizer.get("post_processor") or {}).get("type") == "ByteLevel"
        and not any(bpe.get(key) for key in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges"))
        and not bpe.get("continuing_subword_prefix")
        and not bpe.get("end_of_word_suffix")
        # Added tokens get the next ids in their order.
        and [token["id"] for token in added] == list(range(len(bpe["vocab"]), len(bpe["vocab"]) + len(added)))
    )


def _read_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
    tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    if config.get("tokenizer_class") in _QWEN_CLASSES:
        tokens = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>") | tokens
    return tokens


def _has_all_tokens(config: dict[str, Any], tokenizer: dict[str, Any], special_tokens: Mapping[str, str]) -> bool:
    """Whether every token that tokenizer_config.json names is in tokenizer.json, and the same there."""
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    listed = {int(index): token for index, token in config.get("added_tokens_decoder", {}).items()}
    if listed and listed != {token["id"]: {k: token[k] for k in token if k != "id"} for token in added.values()}:
        return False
    extra = [config.get(name) or [] for name in ("additional_special_tokens", "extra_special_tokens")]
    if not all(isinstance(tokens, list) and all(isinstance(token, str) for token in tokens) for tokens in extra):
        return False
    for name, token in special_tokens.items():
        value = config.get(name)
        if isinstance(value, dict) and any(added[token][key] != value[key] for key in value.keys() & added[token]):
            return False
    marked = [*special_tokens.values(), *(token for tokens in extra for token in tokens)]
    return all(token in added and _is_special(added[token]) for token in marked)


def _is_special(token: dict[str, Any]) -> bool:
    return token["special"] and not any(token[key] for key in ("single_word", "lstrip", "rstrip", "normalized"))


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError("several chat templates")
    return template


# -- chat templates ---------------------------------------------------------------------------


def render_template(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Render a chat template as transformers does: sandboxed, with ``tojson``, ``raise_exception``, ``strftime_now``.

    Missing ``tools`` and ``documents`` are None, and a missing ``add_generation_prompt`` is False.
    """
    defaults = {"tools": None, "documents": None, "add_generation_prompt": False}
    return _compile_template(template).render(messages=list(messages), **{**defaults, **variables})


@lru_cache(maxsize=8)
def _compile_template(template: str) -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
