"""Before a server listens: record the engine's steps and compile what prompts take, so that no request waits for it."""

from __future__ import annotations

import numpy as np

from miles.backends.native.engine import NativeEngine
from miles.core.protocols import Sampling
from miles.observe.view import Stage, View

# Prompts for which all that others take is compiled: a long one, and one whose length is no round number.
_PROMPTS = (2048, 37)


async def warm(engine: NativeEngine, view: View) -> None:
    """Record every step that can be recorded, and read prompts; nothing where nothing is recorded, as on a CPU."""
    bars: list[Stage] = []

    def told(done: int, of: int) -> None:
        if done == 1:
            bars.append(view.stage("Recording steps", of))
        bars[0]()

    await engine.warm_up(told)
    if not bars:
        return
    most = min(engine.kv_tokens, engine.spec.max_positions) - 1
    with view.stage("Reading prompts", len(_PROMPTS)) as bar:
        for token, length in enumerate(_PROMPTS):  # of another token each, so that none is found computed
            prompt = np.full(min(length, most), token, np.int32)
            await engine.generate(prompt, Sampling(max_new_tokens=1, ignore_eos=True))
            bar()
    await engine.flush()
