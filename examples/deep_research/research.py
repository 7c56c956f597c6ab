"""How researcher and reader work together: one searches, the other reads what was found and writes a note of it.

The researcher's context has notes, never documents: that is what the reader is for, and why it must be good at it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from miles.core.types import Prompt, Reward
from miles.rollout.multi_agent.agents import Agents
from miles.rollout.tools.search import BM25Index, Document

sys.path.insert(0, str(Path(__file__).parent))
from worlds import SEARCH  # the file beside this one

MOST_SEARCHES = 4
NOTHING = "?"


async def research(prompt: Prompt, cast: Agents) -> Mapping[str, float | Reward]:
    """A rollout.multi_agent.agents.MultiAgentFn: both earn 1 for the right answer, as nobody else grades a note."""
    documents = enumerate(prompt.metadata["documents"])
    index = BM25Index(Document(id=str(number), title=each["title"], text=each["text"]) for number, each in documents)
    messages, searches, notes = [*prompt.messages], 0, 0
    while True:
        reply = await cast["researcher"].chat(messages)
        if not reply.text.startswith(SEARCH) or reply.finish_reason != "stop" or searches == MOST_SEARCHES:
            break
        searches += 1
        note = NOTHING
        for hit in index.search(reply.text.removeprefix(SEARCH), count=1):
            note = (await cast["reader"].chat([{"role": "user", "content": hit.document.text}])).text or NOTHING
            notes += 1
        messages = [*messages, reply.message, {"role": "user", "content": note}]
    right = float(reply.text == prompt.label)
    return {"researcher": right, "reader": right} if notes else {"researcher": right}
