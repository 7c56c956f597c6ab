"""Before a server listens: record the engine's steps and compile what prompts take, so that no request waits for it."""

from __future__ import annotations

import numpy as np

from miles.backends.native.engine import NativeEngine
from miles.core.protocols import Sampling
from miles.observe.view import Stage, View

# Tokens of a prompt for which all that long ones take is compiled.
_PROMPT = 2048


async def warm(engine: NativeEngine, view: View) -> None:
    """Record every step that can be recorded, and read a prompt; nothing where nothing is recorded, as on a CPU."""
    bars: list[Stage] = []

    def told(done: int, of: int) -> None:
        if done == 1:
            bars.append(view.stage("Recording steps", of))
        bars[0]()

    await engine.warm_up(told)
    if not bars:
        return
    length = min(_PROMPT, engine.kv_tokens - 1, engine.spec.max_positions - 1)
    with view.stage("Reading a prompt"):
        await engine.generate(np.zeros(length, np.int32), Sampling(max_new_tokens=1, ignore_eos=True))
        await engine.flush()
