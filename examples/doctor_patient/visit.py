"""How doctor and patient meet: the doctor asks, the patient answers from its card, the doctor names an illness."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from miles.core.types import Prompt, Reward
from miles.rollout.multi_agent.agents import Agents

sys.path.insert(0, str(Path(__file__).parent))
from cases import ANSWERS, SYMPTOMS, question, show_card  # the file beside this one

MOST_QUESTIONS = 3
ASKED = {question(symptom): symptom for symptom in SYMPTOMS}


async def visit(prompt: Prompt, cast: Agents) -> Mapping[str, float | Reward]:
    """A rollout.multi_agent.agents.MultiAgentFn: the doctor earns 1 for the right illness, the patient the share of its
    answers that are true."""
    case = prompt.metadata["case"]
    heard, told = [*prompt.messages], [{"role": "system", "content": show_card(case)}]
    true: list[bool] = []
    while True:
        reply = await cast["doctor"].chat(heard)
        if reply.text not in ASKED or reply.finish_reason != "stop" or len(true) == MOST_QUESTIONS:
            break
        told = [*told, {"role": "user", "content": reply.text}]
        answer = await cast["patient"].chat(told)
        true.append(answer.text == ANSWERS[case[ASKED[reply.text]]])
        if answer.finish_reason != "stop":  # it talks on: nobody can use that
            break
        told = [*told, answer.message]
        heard = [*heard, reply.message, {"role": "user", "content": answer.text}]
    right = float(reply.text == prompt.label)
    return {"doctor": right, "patient": fmean(true)} if true else {"doctor": right}
