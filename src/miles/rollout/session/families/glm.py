"""GLM-4.5 and later: a turn has no end of its own; the head of the next (``<|user|>``, ``<|observation|>``) ends it.

The model samples that head, and it is not written again. Should it sample one that another message's head follows,
both stand there. Thoughts before the last question are left out by the template, and put as an empty pair.
"""

from miles.rollout.session.families.family import Family

GLM = Family(
    name="glm",
    signs=("[gMASK]", "<|user|>", "<|assistant|>"),
    closes=(),
    heads=("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
    stops=("<|endoftext|>",),
    calls="glm",
    thinking=True,
    passing=frozenset(("enable_thinking",)),
    differs=("boundary", "thinking"),
)
