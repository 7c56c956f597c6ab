"""Built-in multi-agent functions, also as examples: solver with verifier, and self-play (see agents.MultiAgentFn).

Both score answers with the run's reward (``--rm-type`` or ``--custom-rm-path``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from miles.core.errors import HookError
from miles.core.types import Prompt, Reward
from miles.rollout.multi_agent.agents import Agents
from miles.rollout.serving.messages import Message, extract_text

CORRECT_THRESHOLD = 0.5
"""An answer with a higher reward is correct, and a verifier should say so."""
VERIFY = "Question:\n{question}\n\nProposed answer:\n{answer}\n\nIs the proposed answer right? Say yes or no."
RIVAL = "Another answered:\n{answer}\n\nGive your own answer."


async def solver_verifier(prompt: Prompt, agents: Agents) -> Mapping[str, float | Reward]:
    """``solver`` answers the prompt; ``verifier`` sees question and answer, and judges whether it is correct.

    The solver earns the run's reward of its answer, the verifier 1 for a verdict that agrees with it.
    """
    _require_roles(agents, "solver", "verifier")
    answer = await agents["solver"].chat(prompt.messages)
    truth = await agents.score("solver")
    question = VERIFY.format(question=extract_text(prompt.messages[-1]), answer=answer.text)
    verdict = await agents["verifier"].chat([{"role": "user", "content": question}])
    return {"solver": truth, "verifier": float(parse_yes_no(verdict.text) is (truth.value > CORRECT_THRESHOLD))}


async def self_play(prompt: Prompt, agents: Agents) -> Mapping[str, float | Reward]:
    """The first two roles answer the same prompt, the second after seeing the first's answer; zero-sum: each earns its
    reward minus its rival's. With ``weights`` of the first for the second, the policy plays against itself."""
    if len(agents) < 2:
        raise HookError("The multi-agent function self_play needs two roles; name two with --policies.")
    first, second = list(agents)[:2]
    answer = await agents[first].chat(prompt.messages)
    rival: Message = {"role": "user", "content": _append_text(prompt, RIVAL.format(answer=answer.text))}
    await agents[second].chat([*prompt.messages[:-1], rival])
    first_reward, second_reward = (await agents.score(first)).value, (await agents.score(second)).value
    return {first: first_reward - second_reward, second: second_reward - first_reward}


def parse_yes_no(text: str) -> bool | None:
    """The last yes or no in a text; None where it has neither.

    >>> parse_yes_no("No... wait, yes!"), parse_yes_no("perhaps")
    (True, None)
    """
    answers = re.findall(r"\b(yes|no)\b", text.lower())
    return answers[-1] == "yes" if answers else None


def _append_text(prompt: Prompt, text: str) -> str:
    return f"{extract_text(prompt.messages[-1])}\n\n{text}"


def _require_roles(agents: Agents, *roles: str) -> None:
    if missing := [role for role in roles if role not in agents]:
        raise HookError(
            f"The multi-agent function needs the roles {' and '.join(roles)}, and there is no {missing[0]}; name it "
            f"with "
            "--policies."
        )
