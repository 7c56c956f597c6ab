"""A checkpoint's own tokenizer behind core.protocols.Tokenizer; transformers is loaded only when one is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles.core.errors import DataError, UsageError

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


class HubTokenizer:
    """Text to tokens and back. Nothing is added to what is encoded: a template writes its own special tokens."""

    def __init__(self, inner: Any, folder: Path) -> None:
        self._inner = inner
        self._folder = folder

    def __len__(self) -> int:
        """Ids it can give, added tokens included; a model's vocabulary may be padded beyond it."""
        return len(self._inner)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        return self._inner.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the tokenizer names one."""
        return self._inner.bos_token_id

    @property
    def inner(self) -> Any:
        """The tokenizer of transformers itself, for code that was written for it."""
        return self._inner

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def vocabulary(self) -> dict[str, int]:
        """Every token as it is written, and its id."""
        return dict(self._inner.get_vocab())

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False))

    def prompt(self, text: str) -> list[int]:
        """A text that stands alone: with the special tokens the tokenizer itself would put around it."""
        return list(self._inner.encode(text))

    def as_json(self) -> str | None:
        """The whole tokenizer as a ``tokenizer.json`` holds it; None for one that is not of that kind."""
        if not self._inner.is_fast:
            return None
        return self._inner.backend_tokenizer.to_str()

    @property
    def chat_template(self) -> str:
        """The text of the template a conversation is written by; several are put one after the other."""
        template = self._inner.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def decode(self, tokens: Sequence[int]) -> str:
        """All of the text, special tokens written out."""
        return self._inner.decode([int(t) for t in tokens], skip_special_tokens=False)

    def text(self, tokens: Sequence[int]) -> str:
        """What a person would read: no special tokens."""
        return self._inner.decode([int(t) for t in tokens], skip_special_tokens=True)

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """A conversation as its chat template writes it; ``add_generation_prompt`` opens the assistant's turn."""
        return self.encode(self.written(messages, **template))

    def written(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """The text that ``render`` encodes."""
        with self._refusing():
            return self._inner.apply_chat_template([dict(m) for m in messages], tokenize=False, **template)

    def marked(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> tuple[list[int], list[bool]] | None:
        """The same tokens, and which of them the template has within ``{% generation %}``; None where it has none."""
        if not self._inner.is_fast or not self._marks(template):
            return None
        how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, **template}
        with self._refusing():
            found = self._inner.apply_chat_template([dict(m) for m in messages], **how)
        return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]

    def _marks(self, template: Mapping[str, Any]) -> bool:
        if not self.has_chat_template:
            return False
        return _MARKS.search(self._inner.get_chat_template(tools=template.get("tools"))) is not None

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        if not self.has_chat_template:
            raise UsageError(f"The tokenizer in {self._folder} has no chat template; leave out --apply-chat-template.")
        import jinja2

        try:
            yield
        except jinja2.TemplateError as error:
            raise DataError(f"The chat template in {self._folder} refused a conversation: {error}.") from error


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> HubTokenizer:
    """The tokenizer of a checkpoint folder. Code that the folder may hold runs only when it is trusted."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _FILES):
        raise UsageError(f"There is no tokenizer in {folder}; copy one there, or check --hf-checkpoint.")
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever a foreign loader raises on a damaged folder
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"The tokenizer in {folder} runs its own code; allow it with --trust-remote-code."
            ) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"The tokenizer in {folder} cannot be loaded ({reason}).") from error
    return HubTokenizer(inner, folder)
