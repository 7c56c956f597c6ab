"""MiniMax M2: ``]~b]user`` or ``ai``, the text, ``[e~[`` and a line's end behind each turn.

The coming turn begins with thoughts, and the template leaves out those before the last question; results of several
tools stand in one turn.
"""

from miles.rollout.session.families.family import Family

MINIMAX = Family(
    name="minimax",
    signs=("]~b]user", "[e~["),
    closes=("[e~[",),
    heads=("]~b]", "]~!b["),
    calls="minimax",
    thinking=True,
    differs=("thinking",),
)
