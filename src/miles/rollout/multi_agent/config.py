"""Options of multi-agent runs: the policies, and the function that runs them."""

from dataclasses import dataclass
from typing import Any

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiAgentConfig:
    """The policies of a multi-agent run and the function that runs them."""

    policies: dict[str, Any] = option(
        factory=dict,
        help="JSON object, or a table in a recipe, that names the policies; each has the options in which it differs, "
        "and train_every, frozen or weights.",
        path="tables",
        inner=("hf_checkpoint", "ref_load", "critic_load"),
        hub="model",
    )
    custom_cast_function_path: str | None = option(
        None, "Hook that runs the policies over a prompt, and may return each one's reward."
    )
    multi_agent_timeout: float = option(3600.0, "Time limit of one multi-agent trajectory.", unit="seconds", gt=0)
