"""Each family under test: its template, its marks, and how its model writes a turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rollout.session.templates import (
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA,
    GLM,
    HARMONY,
    KIMI,
    LLAMA3,
    MINIMAX,
    QWEN3,
    QWEN25,
    SMOLLM2,
    SMOLLM3,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from miles.models.tokenizer import HfTokenizer, load_tokenizer

_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def _xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tagged(name: str, arguments: dict[str, Any], n: int) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _qwen25(thought: str, text: str, calls: list[str]) -> str:
    # Its template begins the line of a call itself, behind the head of the turn which the prompt has ended already.
    return "\n".join([*filter(None, [text]), *calls])


def _thinks(thought: str, text: str, calls: list[str]) -> str:
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + "\n".join([*filter(None, [text]), *calls])


def _in_think(thought: str, text: str, calls: list[str]) -> str:
    called = "\n".join(["\n<minimax:tool_call>", *calls, "</minimax:tool_call>"]) if calls else ""
    return f"{thought}\n</think>\n\n{text}{called}"


def _glm(thought: str, text: str, calls: list[str]) -> str:
    return "\n".join([f"\n<think>{thought}</think>", *filter(None, [text]), *calls])


def _harmony(thought: str, text: str, calls: list[str]) -> str:
    said = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    return said + (calls[0] if calls else f"<|channel|>final<|message|>{text}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family under test: how its model writes a turn (``said``), and what it ends one with."""

    family: str
    template: str
    marks: tuple[str, ...]
    said: Callable[[str, str, list[str]], str] = lambda thought, text, calls: text + "".join(calls)
    call: Callable[[str, dict[str, Any], int], str] = _tagged
    end: str = "<|im_end|>"
    end_of_call: str | None = None
    thinks: bool = False
    keeps: bool = True
    """Does the template write earlier thoughts again, or are there none?"""
    tools: bool = True


CASES = {
    "qwen2.5": Case(family="qwen", template=QWEN25, marks=_IM, said=_qwen25),
    "qwen3": Case(family="qwen3", template=QWEN3, marks=_IM, said=_thinks, thinks=True, keeps=False),
    "smollm2": Case(family="smollm", template=SMOLLM2, marks=_IM, said=_qwen25),
    "smollm3": Case(family="smollm3", template=SMOLLM3, marks=_IM, said=_thinks, thinks=True, keeps=False),
    "llama3": Case(
        family="llama3",
        template=LLAMA3,
        marks=(
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
            *("<|end_of_text|>", "<|python_tag|>"),
        ),
        call=lambda name, arguments, n: f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}',
        end="<|eot_id|>",
    ),
    "gemma": Case(
        family="gemma",
        template=GEMMA,
        marks=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        call=lambda name, arguments, n: json.dumps({"name": name, "parameters": arguments}),
        end="<end_of_turn>",
    ),
    "glm": Case(
        family="glm",
        template=GLM,
        marks=(
            *("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>"),
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
        said=_glm,
        call=lambda name, arguments, n: "\n".join(
            [f"<tool_call>{name}"]
            + [f"<arg_key>{k}</arg_key>\n<arg_value>{_xml_value(v)}</arg_value>" for k, v in arguments.items()]
            + ["</tool_call>"]
        ),
        end="<|user|>",
        end_of_call="<|observation|>",
        thinks=True,
        keeps=False,
    ),
    "deepseek-v3": Case(
        family="deepseek",
        template=DEEPSEEK_V3,
        marks=(
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>"),
            "<｜tool▁output▁end｜>",
        ),
        said=lambda thought, text, calls: (
            text + (f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>" if calls else "")
        ),
        call=lambda name, arguments, n: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        ),
        end="<｜end▁of▁sentence｜>",
    ),
    "kimi": Case(
        family="kimi",
        template=KIMI,
        marks=(
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "[EOS]"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        said=lambda thought, text, calls: (
            text + (f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>" if calls else "")
        ),
        call=lambda name, arguments, n: (
            f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        ),
    ),
    "minimax": Case(
        family="minimax",
        template=MINIMAX,
        marks=("]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        said=_in_think,
        call=lambda name, arguments, n: "\n".join(
            [f'<invoke name="{name}">']
            + [f'<parameter name="{k}">{_xml_value(v)}</parameter>' for k, v in arguments.items()]
            + ["</invoke>"]
        ),
        end="[e~[",
        thinks=True,
        keeps=False,
    ),
    "gpt-oss": Case(
        family="harmony",
        template=HARMONY,
        marks=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        said=_harmony,
        call=lambda name, arguments, n: (
            f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}"
        ),
        end="<|return|>",
        end_of_call="<|call|>",
        thinks=True,
        keeps=False,
    ),
}
CASES["deepseek-r1"] = Case(
    family="deepseek",
    template=DEEPSEEK_R1,
    marks=(*CASES["deepseek-v3"].marks, "<think>", "</think>"),
    said=lambda thought, text, calls: f"{thought}\n</think>\n\n{text}",
    end="<｜end▁of▁sentence｜>",
    thinks=True,
    keeps=False,
    tools=False,
)
CASES["deepseek-v3.1"] = Case(
    family="deepseek",
    template=DEEPSEEK_V31,
    marks=CASES["deepseek-r1"].marks,
    said=lambda thought, text, calls: (
        text + (f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>" if calls else "")
    ),
    call=lambda name, arguments, n: (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
    ),
    end="<｜end▁of▁sentence｜>",
)

_CORPUS = (
    "the weather in the city is fine and the answer is forty two\n\n",
    'system user assistant tool ipython model {"name": "weather", "arguments": {"city": "Bonn", "days": 3}}\n',
    "<tool_response>\n</tool_response>\n<response></response> analysis commentary final functions json",
)
# Words with what stands before them, punctuation with the lines it ends, and the ends of lines together.
_WORDS = r"[^\r\n\w]?\w+| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def save_tokenizer(folder: Path, template: str, marks: tuple[str, ...], end: str) -> HfTokenizer:
    """A byte-level BPE trained on a few lines, whose special tokens are the family's marks."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    inner.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end)
    fast.add_special_tokens({"additional_special_tokens": [mark for mark in marks if mark != end]})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return load_tokenizer(folder)
