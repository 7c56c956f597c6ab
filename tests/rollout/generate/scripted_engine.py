"""Small real parts for tests of conversations: a tokenizer whose template knows tools, and an engine with a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles.core.protocols import Completion, SamplingParams
from miles.core.types import Author, Span, Status, Tokens, Version
from miles.models.tokenizer import HfTokenizer, load_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>"
    "{% if m.role == 'tool' %}user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(folder: Path) -> HfTokenizer:
    """Of single bytes, with marks around turns and calls as Qwen's have them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return load_tokenizer(folder)


def call(name: str, **arguments: object) -> str:
    """A call as the policy would write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Scripted:
    """An engine that samples scripted responses in turn, the last one for ever, and records requests and responses."""

    def __init__(self, tokenizer: HfTokenizer, script: Sequence[str] | Callable[[str], str]) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.gave: list[list[int]] = []
        self.hangs = False
        self.aborts = False

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images=()) -> Completion:
        self.asked.append((tokens.tolist(), sampling))
        if self.hangs:
            await asyncio.Event().wait()
        ids = [*self._tokenizer.encode(self._line(tokens)), self._tokenizer.eos_token_id]
        kept = ids[: sampling.max_new_tokens]
        done = len(kept) == len(ids)
        self.gave.append(kept)
        half = len(kept) // 2  # weights that change in mid-reply
        spans = [self._span(kept[:half], 1), self._span(kept[half:], 2)]
        if self.aborts:
            return Completion(spans=(spans[0],), status=Status.ABORTED, finish_reason="abort")
        status = Status.COMPLETED if done else Status.TRUNCATED
        return Completion(spans=tuple(spans), status=status, finish_reason="stop" if done else "length")

    def _line(self, tokens: Tokens) -> str:
        if callable(self._script):
            return self._script(self._tokenizer.decode(tokens.tolist()))
        return self._script[min(len(self.asked), len(self._script)) - 1]

    def _span(self, ids: list[int], version: int) -> Span:
        return Span(
            author=Author.POLICY,
            tokens=np.array(ids, np.int32),
            logprobs=np.linspace(-1, -2, len(ids), dtype=np.float32),
            version=Version(number=version),
        )
