"""Rules of conversations in several turns: who answers, with which tools, and what must be installed for it."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from miles.algo.config import GIVEN
from miles.launch.config import Config
from miles.plug.points import GENERATE

SEVERAL = "multi_turn"


def one_function_answers_a_prompt(c: Config) -> Iterator[str]:
    agent, generate = c.agents.custom_agent_function_path, c.rollout.custom_generate_function_path
    if agent and generate and GENERATE.now(generate) != "agent":
        yield (
            f"--custom-agent-function-path {agent} and --custom-generate-function-path {generate} both answer prompts; "
            "keep one."
        )


def an_agent_has_a_server_to_ask(c: Config) -> Iterator[str]:
    if c.agents.custom_agent_function_path and find_spec("aiohttp") is None:
        yield "--custom-agent-function-path needs aiohttp, which is not installed: pip install 'miles-rl[serve]'."


def several_turns_are_of_a_chat(c: Config) -> Iterator[str]:
    answers = GENERATE.now(c.rollout.custom_generate_function_path) == SEVERAL or c.agents.custom_agent_function_path
    if answers and not c.rollout.apply_chat_template:
        yield "An answer in several turns is a chat: add --apply-chat-template."
    if answers and c.algo.loss_type in GIVEN and not c.rollout.eval_prompt_data:  # held-out prompts are answered so too
        yield f"--loss-type {c.algo.loss_type} samples nothing, so nobody answers in several turns; leave that out."


def tools_are_for_several_turns(c: Config) -> Iterator[str]:
    t = c.tools
    asked = {
        "--generate-tools": t.generate_tools,
        "--generate-tool-specs-path": t.generate_tool_specs_path,
        "--generate-environment": t.generate_environment,
    }
    for flag, given in asked.items():
        if given and GENERATE.now(c.rollout.custom_generate_function_path) != SEVERAL:
            yield f"{flag} is for answers in several turns; add --custom-generate-function-path {SEVERAL}."


AGENTS: tuple[Callable[[Config], Iterator[str]], ...] = (
    one_function_answers_a_prompt,
    an_agent_has_a_server_to_ask,
    several_turns_are_of_a_chat,
    tools_are_for_several_turns,
)
