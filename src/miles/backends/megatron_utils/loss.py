"""Upstream's log-probs and entropies of a loss, in their former form."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from miles.algo import hook_adapters
from miles.algo.hook_adapters import PolicyLogits


def get_log_probs_and_entropy(logits: PolicyLogits, **values: Any) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """A tensor that is not used, and the log-probs and entropies."""
    return logits.sum(), hook_adapters.get_log_probs_and_entropy(logits, **values)
