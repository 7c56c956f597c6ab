"""Qwen2.5 and others of its ChatML: ``<|im_start|>role``, the text, ``<|im_end|>``, a line's end behind each turn.

Tool results are the user's, in ``<tool_response>``; calls are JSON in ``<tool_call>``.
"""

from miles.rollout.session.families.family import Family

QWEN = Family(
    name="qwen",
    signs=("<|im_start|>user", "<|im_end|>"),
    closes=("<|im_end|>",),
    heads=("<|im_start|>",),
    stops=("<|endoftext|>",),
    calls="qwen",
)
