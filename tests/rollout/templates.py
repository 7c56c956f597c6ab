"""Chat templates as widely used families write them, and a tokenizer whose markers are tokens of their own."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles.models.tokenizer import HfTokenizer, load_tokenizer

MARKERS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>",
)  # fmt: skip

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A system message where the conversation brings none, as SmolLM2 has it.
SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Headers by name, the text trimmed, no line after an end, as Llama 3 has it.
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Thoughts of turns before the last question are left out, and those after it are always written; tool results are
# the user's. That is what Qwen3 does.
QWEN3 = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set parts = m.content.split('</think>') -%}
{%- set said = parts[-1].lstrip('\\n') -%}
{%- set thought = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' -%}
{{- '<|im_start|>assistant\\n' }}
{%- set shown = loop.index0 > ns.last and (loop.last or thought) -%}
{%- if shown %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif -%}
{{- said + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}
"""
# The template's own word for what the assistant wrote.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same, with thoughts of earlier turns left out: it rewrites, and still says which tokens are the assistant's.
MARKED_THINKING = MARKED.replace(
    "{{ m.content }}<|im_end|>{% endgeneration",
    "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip() }}<|im_end|>{% endgeneration",
)
# One passage a line of a message, so that a message has several.
MARKED_LINES = MARKED.replace(
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}",
    "{% for line in m.content.split('|') %}{% generation %}{{ line }}{% endgeneration %};{% endfor %}<|im_end|>",
)


def tokenizer_with(folder: Path, template: str, eos: str = "<|im_end|>") -> HfTokenizer:
    """Bytes and a few merges, among them one that would join a line's end to the next line's beginning."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "n"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ċ"), ("Ċ", "-")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos)
    fast.add_special_tokens({"additional_special_tokens": [m for m in MARKERS if m != eos]})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return load_tokenizer(folder)
