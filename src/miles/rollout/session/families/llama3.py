"""Llama 3: headers by name, the text trimmed, ``<|eot_id|>`` behind each turn.

A turn that calls a built-in tool ends with ``<|eom_id|>``, which the template writes again only where tools are
offered; results are ``ipython``'s. A conversation may hold one call a turn.
"""

from miles.rollout.session.families.family import Family

LLAMA3 = Family(
    name="llama3",
    signs=("<|start_header_id|>user<|end_header_id|>", "<|eot_id|>"),
    closes=("<|eot_id|>", "<|eom_id|>"),
    heads=("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    stops=("<|end_of_text|>",),
    calls="llama3",
    differs=("boundary", "whitespace"),
)
