"""Two ways for policies to meet, to use as they are or to read before writing one: see rollout.cast.cast.Play.

Both ask the run's own reward (``--rm-type`` or ``--custom-rm-path``) what an answer is worth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from miles.core.errors import PlugError
from miles.core.types import Prompt, Reward
from miles.rollout.cast.cast import Cast
from miles.rollout.session.message import Message, text_of

RIGHT = 0.5
"""An answer that earns more than this is right, and a verifier should say so."""
VERIFY = "Question:\n{question}\n\nProposed answer:\n{answer}\n\nIs the proposed answer right? Say yes or no."
RIVAL = "Another answered:\n{answer}\n\nGive your own answer."


async def solver_verifier(prompt: Prompt, cast: Cast) -> Mapping[str, float | Reward]:
    """``solver`` answers the prompt; ``verifier`` sees question and answer, and says whether it is right.

    The solver earns what the run's reward gives its answer, the verifier 1 for a verdict that agrees with it.
    """
    _want(cast, "solver", "verifier")
    answer = await cast["solver"].say(prompt.messages)
    truth = await cast.score("solver")
    question = VERIFY.format(question=text_of(prompt.messages[-1]), answer=answer.text)
    verdict = await cast["verifier"].say([{"role": "user", "content": question}])
    return {"solver": truth, "verifier": float(says_yes(verdict.text) is (truth.value > RIGHT))}


async def self_play(prompt: Prompt, cast: Cast) -> Mapping[str, float | Reward]:
    """The first two roles answer the same prompt, the second with the first's answer before it; one wins what the
    other loses: each earns its own reward less its rival's. With ``weights`` of the first for the second it plays
    against itself."""
    if len(cast) < 2:
        raise PlugError("The cast function self_play wants two roles; name two with --policies.")
    first, second = list(cast)[:2]
    answer = await cast[first].say(prompt.messages)
    rival: Message = {"role": "user", "content": _added(prompt, RIVAL.format(answer=answer.text))}
    await cast[second].say([*prompt.messages[:-1], rival])
    one, other = (await cast.score(first)).value, (await cast.score(second)).value
    return {first: one - other, second: other - one}


def says_yes(text: str) -> bool | None:
    """The last yes or no in a text; None where it has neither.

    >>> says_yes("No... wait, yes!"), says_yes("perhaps")
    (True, None)
    """
    found = re.findall(r"\b(yes|no)\b", text.lower())
    return found[-1] == "yes" if found else None


def _added(prompt: Prompt, more: str) -> str:
    return f"{text_of(prompt.messages[-1])}\n\n{more}"


def _want(cast: Cast, *roles: str) -> None:
    if missing := [role for role in roles if role not in cast]:
        raise PlugError(
            f"The cast function wants the roles {' and '.join(roles)}, and there is no {missing[0]}; name it with "
            "--policies."
        )
