"""Small real parts for the rollout tests: a byte-level tokenizer with a chat template, and a deterministic engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles.core.protocols import Completion, SamplingParams
from miles.core.types import Author, Span, Status, Tokens, Version

SPECIAL = ["<|start|>", "<|end|>", "<|pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if think is defined and not think %}(brief) {% endif %}{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tokenizer of single bytes with a few merges, written as a checkpoint's would be."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


class Echo:
    """A real, if simple, policy: what it writes is ``words(sampling.seed)``, in tokens, and it never waits for long."""

    def __init__(self, encode: Callable[[str], list[int]], words: Callable[[int], str], *, end: int) -> None:
        self._encode, self._words, self._end = encode, words, end
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images=()) -> Completion:
        self.asked.append((tokens.tolist(), sampling))
        for _ in range(sampling.seed % 5):  # let trajectories overtake each other
            await asyncio.sleep(0)
        ids = [*self._encode(self._words(sampling.seed)), self._end]
        kept = ids[: sampling.max_new_tokens]
        done = len(kept) == len(ids)
        span = Span(
            author=Author.POLICY,
            tokens=np.array(kept, np.int32),
            logprobs=np.full(len(kept), -1.0, np.float32),
            version=Version(),
        )
        status = Status.COMPLETED if done else Status.TRUNCATED
        return Completion(spans=(span,), status=status, finish_reason="stop" if done else "length")
