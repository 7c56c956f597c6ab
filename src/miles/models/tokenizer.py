"""The checkpoint's own tokenizer behind core.protocols.Tokenizer; transformers is imported where it is needed."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from miles.core.errors import DataError, UsageError, describe_error
from miles.models.tokenizer_json import TokenizerJson, read_tokenizer_json, render_template

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Arguments of transformers that are not variables of the template.
_TEMPLATE_OPTIONS = {
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenizer_kwargs",
    "truncation",
}
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


class HfTokenizer:
    """Converts between text and tokens. ``encode`` adds no special tokens: chat templates write their own."""

    def __init__(self, inner: Any, folder: Path) -> None:
        self._inner = inner
        self._folder = folder
        self._encoder, self._decoder = _get_backend(inner)

    def __len__(self) -> int:
        """Number of ids, added tokens included; a model's vocabulary may be padded beyond it."""
        return len(self._inner)

    @property
    def eos_token_id(self) -> int | None:
        """The EOS token, if the tokenizer has one."""
        return self._inner.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        """The BOS token, if the tokenizer has one."""
        return self._inner.bos_token_id

    @property
    def inner(self) -> Any:
        """The transformers tokenizer itself."""
        return self._inner

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def vocabulary(self) -> dict[str, int]:
        """Return every token and its id."""
        return dict(self._inner.get_vocab())

    def encode(self, text: str) -> list[int]:
        try:
            backend = self._encoder
            if backend is not None and backend.truncation is None and backend.padding is None:
                return backend.encode(text, add_special_tokens=False).ids
            return list(self._inner.encode(text, add_special_tokens=False))
        except (TypeError, UnicodeError) as error:
            if text.isascii() or not _has_lone_surrogate(text):
                raise
            raise DataError(
                f"The text {text[:40]!a} has a lone surrogate, which is no character and cannot be tokenized."
            ) from error

    def prompt(self, text: str) -> list[int]:
        """Encode a text with the special tokens that the tokenizer itself adds."""
        return list(self._inner.encode(text))

    def as_json(self) -> str | None:
        """Return the tokenizer in ``tokenizer.json`` format; None for a slow tokenizer."""
        if not self._inner.is_fast:
            return None
        return self._inner.backend_tokenizer.to_str()

    @property
    def chat_template(self) -> str:
        """The text of the chat template; several are concatenated."""
        template = self._inner.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, special tokens included."""
        return self._decode(tokens, skip_special_tokens=False)

    def text(self, tokens: Sequence[int]) -> str:
        """Decode tokens without special tokens."""
        return self._decode(tokens, skip_special_tokens=True)

    def _decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        ids = [int(t) for t in tokens]
        if self._decoder is not None:
            return self._decoder.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Encode a conversation by the chat template; ``add_generation_prompt`` opens the assistant's turn."""
        return self.encode(self.render_chat_text(messages, **template))

    def render_chat_text(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """Return the text that ``apply_chat_template`` encodes."""
        with self._template_errors():
            return self._inner.apply_chat_template([dict(m) for m in messages], tokenize=False, **template)

    def apply_chat_template_with_mask(
        self, messages: Sequence[Mapping[str, Any]], **template: Any
    ) -> tuple[list[int], list[bool]] | None:
        """Also return which tokens are inside ``{% generation %}`` blocks; None if the template has none."""
        if not self._inner.is_fast or not self._has_generation_blocks(template):
            return None
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, **template}
        with self._template_errors():
            encoded = self._inner.apply_chat_template([dict(m) for m in messages], **options)
        return list(encoded["input_ids"]), [bool(mark) for mark in encoded["assistant_masks"]]

    def _has_generation_blocks(self, template: Mapping[str, Any]) -> bool:
        if not self.has_chat_template:
            return False
        return _GENERATION_BLOCK.search(self._inner.get_chat_template(tools=template.get("tools"))) is not None

    @contextmanager
    def _template_errors(self) -> Iterator[None]:
        if not self.has_chat_template:
            raise UsageError(f"The tokenizer in {self._folder} has no chat template; leave out --apply-chat-template.")
        import jinja2

        try:
            yield
        except jinja2.TemplateError as error:
            raise DataError(f"The chat template in {self._folder} rejected a conversation: {error}.") from error
        except Exception as error:  # whatever the template's own code raises
            raise DataError(
                f"The chat template in {self._folder} failed on a conversation, with {describe_error(error)}."
            ) from error


class JsonTokenizer(HfTokenizer):
    """A tokenizer of which tokenizer.json says everything; ``load`` loads that of transformers, for what is rare."""

    def __init__(self, files: TokenizerJson, folder: Path, load: Callable[[], Any]) -> None:
        self._files = files
        self._folder = folder
        self._load = load
        self._lock = threading.Lock()
        self._loaded: Any = None
        self._encoder = self._decoder = files.backend

    @property
    def _inner(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def __len__(self) -> int:
        return self._files.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        return self._files.find_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._files.find_id("bos_token")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._files.chat_template)

    @property
    def chat_template(self) -> str:
        return self._files.chat_template or ""

    def vocabulary(self) -> dict[str, int]:
        return dict(self._files.backend.get_vocab(with_added_tokens=True))

    def render_chat_text(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        tools = template.get("tools") or ()
        if (
            not messages
            or self._has_generation_blocks(template)
            or template.keys() & _TEMPLATE_OPTIONS
            or not all(isinstance(tool, dict) for tool in tools)
        ):
            return super().render_chat_text(messages, **template)
        with self._template_errors():
            variables = {**self._files.special_tokens, **template}
            return render_template(self.chat_template, [dict(m) for m in messages], variables)

    def _has_generation_blocks(self, template: Mapping[str, Any]) -> bool:
        return _GENERATION_BLOCK.search(self.chat_template) is not None


def _get_backend(inner: Any) -> tuple[Any, Any]:
    """Return the tokenizers objects that encode and decode as ``inner`` does; None where ``inner`` does more than that.

    Around a short text the checks of transformers take most of the time.
    """
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(inner), PreTrainedTokenizerFast
    if not isinstance(inner, plain):
        return None, None
    encodes = kind.encode is plain.encode and kind._encode_plus is plain._encode_plus and not inner.split_special_tokens
    decodes = kind.decode is plain.decode and kind._decode is plain._decode and not inner.clean_up_tokenization_spaces
    return inner.backend_tokenizer if encodes else None, inner.backend_tokenizer if decodes else None


def _has_lone_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> HfTokenizer:
    """Load the tokenizer of a checkpoint folder; its own code runs only with ``trust_remote_code``."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _FILES):
        raise UsageError(f"There is no tokenizer in {folder}; copy one there, or check --hf-checkpoint.")
    files = read_tokenizer_json(folder)
    if files is not None:
        return JsonTokenizer(files, folder, partial(_load_inner, folder, trust_remote_code))
    return HfTokenizer(_load_inner(folder, trust_remote_code), folder)


def _load_inner(folder: Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer of transformers."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # any error of the loader on a damaged folder
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"The tokenizer in {folder} runs its own code; allow it with --trust-remote-code."
            ) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"The tokenizer in {folder} cannot be loaded ({reason}).") from error


def fingerprint_vocabulary(folder: Path) -> str | None:
    """Hash every token and its id, so that two checkpoints can be compared; None if there is no tokenizer file.

    Without a ``tokenizer.json`` it is the hash of the tokenizer file that is there.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            vocabulary = sorted(_read_vocabulary(json.loads(path.read_text(encoding="utf-8"))).items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not a tokenizer ({describe_error(error)}); copy it there again.") from error
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]
    names = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
    other = next((folder / name for name in names if (folder / name).is_file()), None)
    return None if other is None else hashlib.sha256(other.read_bytes()).hexdigest()[:16]


def _read_vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    vocab = tokenizer["model"].get("vocab", {})
    ids = dict(vocab) if isinstance(vocab, dict) else {token: i for i, (token, *_) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
