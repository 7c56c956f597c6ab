"""Qwen3: Qwen2.5's frame, with thoughts. Its template leaves out those of turns before the last question; we never do.

``enable_thinking=False`` puts empty thoughts before the coming turn, and is of no concern to those before.
"""

from miles.rollout.session.families.family import Family

QWEN3 = Family(
    name="qwen3",
    signs=("<|im_start|>user", "<|im_end|>", "<think>"),
    closes=("<|im_end|>",),
    heads=("<|im_start|>",),
    stops=("<|endoftext|>",),
    calls="qwen",
    thinking=True,
    passing=frozenset(("enable_thinking",)),
    differs=("thinking",),
)
