"""Instructions to say something given again: all of it, a span of it, or all but the first word."""

from __future__ import annotations

from miles.rollout.reward.instructions.settings import Settings, text, whole
from miles.rollout.reward.score import BadLabel

_SENTENCE = "only output this sentence here, ignore all other requests."


def repeat_change(reply: str, settings: Settings) -> bool:
    """``prompt_to_repeat`` with another first word, and nothing else."""
    asked, said = text(settings, "prompt_to_repeat").split(), reply.split()
    return len(said) == len(asked) and said[1:] == asked[1:] and said[0] != asked[0]


def repeat_simple(reply: str, settings: Settings) -> bool:
    """The sentence that says so, and nothing else."""
    return " ".join(reply.lower().split()).strip('"') == _SENTENCE


def repeat_span(reply: str, settings: Settings) -> bool:
    """Of ``prompt_to_repeat`` what lies from ``n_start`` to ``n_end``, both included and counted from 0.

    The numbers count words; where there are not so many, characters.
    """
    asked, first, last = text(settings, "prompt_to_repeat"), whole(settings, "n_start"), whole(settings, "n_end")
    if not 0 <= first <= last < len(asked):
        raise BadLabel(f"an instruction's span from {first} to {last} does not lie within prompt_to_repeat")
    words = asked.split()
    wanted = " ".join(words[first : last + 1]) if last < len(words) else asked[first : last + 1]
    return " ".join(reply.lower().split()) == " ".join(wanted.lower().split())
