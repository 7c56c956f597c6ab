"""Knobs of runs with several policies: who they are, and the function that has them meet."""

from dataclasses import dataclass
from typing import Any

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class CastConfig:
    """Which policies there are, and how they meet."""

    policies: dict[str, Any] = knob(
        factory=dict,
        help="JSON object, or a table in a recipe, that names the policies; of each the knobs in which it differs, and "
        "train_every, frozen or weights.",
        path="tables",
        inner=("hf_checkpoint", "ref_load", "critic_load"),
    )
    custom_cast_function_path: str | None = knob(
        None, "Plug that has the policies meet over a prompt, and may say what each has earned."
    )
    cast_timeout: float = knob(3600.0, "Longest the policies may take over one attempt.", unit="seconds")
