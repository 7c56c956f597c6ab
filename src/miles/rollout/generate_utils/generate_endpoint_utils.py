"""Upstream's parts of a request to the engine's ``/generate``."""

from miles.hooks.compat.generation import (
    compute_prompt_ids_from_sample,
    compute_request_payload,
    update_sample_from_response,
)

__all__ = ["compute_prompt_ids_from_sample", "compute_request_payload", "update_sample_from_response"]
