"""SmolLM2 and SmolLM3: ChatML with a system message of its own where the conversation brings none.

SmolLM3 thinks, and its template leaves out earlier thoughts.
"""

from miles.rollout.session.families.family import Family

SMOLLM = Family(
    name="smollm",
    signs=("<|im_start|>user", "<|im_end|>", "SmolLM"),
    closes=("<|im_end|>",),
    heads=("<|im_start|>",),
    stops=("<|endoftext|>",),
    calls="qwen",
)
SMOLLM3 = Family(
    name="smollm3",
    signs=("<|im_start|>user", "<|im_end|>", "SmolLM", "<think>"),
    closes=("<|im_end|>",),
    heads=("<|im_start|>",),
    stops=("<|endoftext|>", "<|end_of_text|>"),
    calls="qwen",
    thinking=True,
    differs=("thinking",),
)
