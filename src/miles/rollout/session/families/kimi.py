"""Kimi K2: ``<|im_user|>user<|im_middle|>``, the text, ``<|im_end|>``, nothing between turns.

Calls are numbered through the conversation, and a result names the number: the model's own ids are kept.
"""

from miles.rollout.session.families.family import Family

KIMI = Family(
    name="kimi",
    signs=("<|im_user|>", "<|im_middle|>"),
    closes=("<|im_end|>",),
    heads=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    stops=("[EOS]",),
    calls="kimi",
    thinking=True,
    differs=("thinking",),
)
