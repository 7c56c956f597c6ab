"""Upstream's configuration of held-out sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class EvalDatasetConfig:
    """A held-out set: its name, its file, and what differs from the flags."""

    name: str
    path: str
    rm_type: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What determines the prompts of the set."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, sample_metadata: Any) -> dict[str, Any]:
        """The metadata of a sample with what the set adds to it."""
        metadata = dict(sample_metadata) if isinstance(sample_metadata, dict) else {}
        return metadata | ({"rm_type": self.rm_type} if self.rm_type is not None else {}) | self.metadata_overrides
