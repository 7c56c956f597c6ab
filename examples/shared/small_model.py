"""A small chat model made on the spot: a Qwen3 of 0.1 M weights, a word-level tokenizer and a chat template with tools.

Demonstrations are conversations of ``ask``, ``say``, ``call`` and ``report``; ``offer`` is what the template writes of
the tools themselves. ``call_pieces`` are the tokens of a call, so that a call is two or three tokens long.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from word_tokenizer import write_tokenizer  # the file beside this one

from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

Message = dict[str, object]
SLOT = "§"
"""What stands in ``call_pieces`` for the part of an argument that the model writes itself."""
END = "<|im_end|>"
SPECIAL = ("<|im_start|>", END)
ROLES = ("system\n", "user\n", "assistant\n", "<tool_response>\n", "\n</tool_response>")
TEMPLATE = (
    "{% for t in tools or [] %}<|im_start|>system\n{{ t.function.name }}" + END + "\n{% endfor %}"
    "{% for m in messages %}<|im_start|>"
    "{% if m.role == 'tool' %}user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role != 'assistant' %}{{ m.role }}\n{{ m.content }}"
    "{% else %}assistant\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endif %}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ask(text: str) -> Message:
    """What a user, or an environment, says."""
    return {"role": "user", "content": text}


def say(text: str) -> Message:
    """A reply, which is learned from."""
    return {"role": "assistant", "content": text}


def call(tool: str, **arguments: object) -> Message:
    """A reply that calls a tool."""
    function = {"name": tool, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def report(text: str) -> Message:
    """The result of a call."""
    return {"role": "tool", "content": text}


def offer(*tools: str) -> list[Message]:
    """The names of the tools, as the template writes them."""
    return [{"role": "system", "content": tool} for tool in tools]


def call_pieces(tool: str, **arguments: object) -> list[str]:
    """The text of a call, cut where ``SLOT`` stands.

    >>> call_pieces("shell", command="cat §")[1]
    '"}}\\n</tool_call>'
    """
    written = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {written}}}\n</tool_call>'.split(SLOT)


def write_small_model(
    folder: Path,
    pieces: Sequence[str],
    *,
    letters: str = "",
    seed: int = 0,
    hidden_size: int = 64,
    max_positions: int = 128,
) -> None:
    """A random model and its tokenizer: a token for each of ``pieces`` and ``letters``, and of the template's parts."""
    import torch

    from miles.models.checkpoint import hf
    from miles.models.families import config_from_spec

    folder.mkdir(parents=True, exist_ok=True)
    single = dict.fromkeys(["\n", " ", "?", *letters, *(piece for piece in pieces if len(piece) == 1)])
    longer = dict.fromkeys([*ROLES, *(piece for piece in pieces if len(piece) > 1), *SPECIAL])
    vocabulary = {token: number for number, token in enumerate([*single, *longer])}
    spec = _spec(len(vocabulary), hidden_size, max_positions)
    decoder = hf.init_random(spec, seed=seed, device="cpu", dtype=torch.float32)
    hf.export(decoder, folder, like=None, config=config_from_spec(spec))
    write_tokenizer(folder, vocabulary, pieces=tuple(longer), special=SPECIAL, eos_token=END, chat_template=TEMPLATE)


def _spec(vocab_size: int, hidden_size: int, max_positions: int) -> DecoderSpec:
    rope = RopeSpec(theta=10000.0)
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=hidden_size // 4, rope=rope, qk_norm="head")
    return DecoderSpec(
        family="qwen3",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        norm_eps=1e-6,
        layers=2 * (LayerSpec(mixer=attention, ffn=MlpSpec(size=2 * hidden_size)),),
        tie_embeddings=True,
        max_positions=max_positions,
        eos_token_ids=(vocab_size - 1,),
    )
