"""What functions of upstream's signatures may know of a run: its flags, and prompts as upstream shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from miles.algo.credit import rows_of
from miles.config.origin import values_of
from miles.core.types import Prompt
from miles.launch.config import Config
from miles.models.tokenizer import HubTokenizer, load_tokenizer
from miles.plug.upstream.run import Arguments, Run
from miles.rollout.given import stamped
from miles.rollout.render import Renderer

# A name no client reaches: requests to the engine go to it directly, whatever host they name.
_ENGINE = {"sglang_router_ip": "engine.invalid", "sglang_router_port": 80}


def upstream_of(config: Config) -> Run:
    """The run as such a function sees it; the tokenizer is read when one is first asked for."""
    r, m = config.rollout, config.models

    @cache
    def tokenizer() -> HubTokenizer:
        assert m.hf_checkpoint is not None
        return load_tokenizer(m.hf_checkpoint, m.trust_remote_code)

    @cache
    def renderer() -> Renderer:
        return Renderer(tokenizer(), chat=r.apply_chat_template, template=r.apply_chat_template_kwargs)

    def shown(prompt: Prompt) -> str | Sequence[Mapping[str, Any]]:
        if r.apply_chat_template:
            return tokenizer().written(prompt.messages, add_generation_prompt=True, **r.apply_chat_template_kwargs)
        lone = prompt.messages[0]["content"] if len(prompt.messages) == 1 else None
        return lone if isinstance(lone, str) else [dict(message) for message in prompt.messages]

    return Run(
        args=Arguments({**_ENGINE, **values_of(config)}),
        tokenizer=lambda: tokenizer().inner,
        render=lambda prompt: renderer()(prompt),
        shown=shown,
        stamp=stamped,
        rows=rows_of,
    )
