"""docs/tools.md says what exists, and its examples run."""

import asyncio
import re
from pathlib import Path

from tests.rollout.generate.scripted_engine import Scripted, call, chat_tokenizer

from miles.core.protocols import SamplingParams
from miles.core.types import Prompt
from miles.rollout.tools.env_registry import ENVIRONMENTS
from miles.rollout.tools.toolbox import BUILT_IN

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()


def test_every_tool_and_environment_is_on_the_page():
    for name in (*BUILT_IN, *ENVIRONMENTS):
        assert f"| `{name}` |" in PAGE, name


def test_the_examples_of_the_page_run(tmp_path):
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        exec(block, names)
    tokenizer = chat_tokenizer(tmp_path)
    generate = names["generate_with"](tokenizer)
    prompt = Prompt(id=1, messages=({"role": "user", "content": "Umbrella?"},))
    asked = Scripted(tokenizer, [call("weather", city="Bern", days=2), "Yes."])
    trajectory = asyncio.run(generate(prompt, asked, SamplingParams(max_new_tokens=500)))
    assert trajectory.metadata["messages"][2]["content"] == "Rain in Bern, for 2 days."
    counted = Prompt(id=1, messages=prompt.messages, metadata={"environment": "countdown"})
    trajectory = asyncio.run(
        generate(counted, Scripted(tokenizer, ["3", "2", "1"]), SamplingParams(max_new_tokens=500))
    )
    assert trajectory.reward is not None and trajectory.reward.value == 1.0
