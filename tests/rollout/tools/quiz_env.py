"""Environments of the package verifiers, one of each of its kinds, as modules of its hub have them."""

import verifiers as vf
from datasets import Dataset

ROWS = [{"prompt": [{"role": "user", "content": "A number?"}], "answer": "7"}]


async def right(completion, answer):
    return float(completion[-1].content == answer)


async def best(states):
    """A reward that is given to a group as a whole."""
    return [1.0 for _ in states]


async def double(number: int) -> str:
    """Twice a number.

    Args:
        number: The number.
    """
    return str(2 * number)


class Guessing(vf.MultiTurnEnv):
    """Says higher or lower until it is found; ``forgetful`` shows no more than its last word."""

    def __init__(self, forgetful=False, **rest):
        super().__init__(**rest)
        self.forgetful = forgetful

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]

    async def env_response(self, messages, state, **rest):
        higher = int(messages[-1].content) < int(state["answer"])
        return [{"role": "user", "content": "higher" if higher else "lower"}]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if self.forgetful else messages


class Broken(vf.SingleTurnEnv):
    async def setup_state(self, state):
        raise vf.InfraError("the quiz is off")


def load_environment(kind="one", **settings):
    rest = {"dataset": Dataset.from_list(ROWS), "rubric": vf.Rubric(funcs=[best if kind == "group" else right])}
    if kind == "tool":
        return vf.ToolEnv(tools=[double], **rest)
    return {"one": vf.SingleTurnEnv, "group": vf.SingleTurnEnv, "several": Guessing, "broken": Broken}[kind](
        **rest, **settings
    )
