"""Activation checkpointing (recomputation): what a layer saves of its forward pass for backward.

    none       everything autograd needs
    selective  the layer's input, attention outputs and matmul outputs
    full       the layer's input only

Matmuls and attention take nearly all of a layer's time, while the operations between them (norms, RoPE, activations,
casts: the inputs of every matmul) are half or more of what it saves. Selective recomputes only those from the saved
matmul outputs (and, of short sequences, the attention that is a Triton kernel). Full also recomputes the matmuls: a
third more time, and the least memory. Collectives inside a layer are repeated by all ranks under both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

RecomputeMode = Literal["none", "selective", "full"]
CheckpointFn = Callable[..., Any]
"""Calls a function with the arguments that follow it, under a checkpoint so that backward can call it again."""

# By name, as not every build of torch has all of them. Batched matmuls are excluded: eager attention and recurrences
# use them, and their outputs grow with the square of the sequence length.
_MATMULS = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm")
_ATTENTION = ("scaled_dot_product", "varlen_attn", "flash_attention", "efficient_attention")


def select_checkpoint_fn(mode: RecomputeMode) -> CheckpointFn | None:
    """Return the function that runs a layer under a checkpoint; None if nothing is recomputed."""
    return {"none": None, "selective": checkpoint_selective, "full": checkpoint_full}[mode]


class SupportsRecompute(Protocol):
    """A model whose layers can be recomputed in backward: with ``checkpoint_layers``, the first
    ``recompute_num_layers`` of them (or all) run under ``checkpoint_fn``.
    """

    checkpoint_layers: bool
    checkpoint_fn: CheckpointFn
    recompute_num_layers: int | None


def set_recompute(model: SupportsRecompute, mode: RecomputeMode, layers: int | None = None) -> None:
    """Set the recompute mode of ``model`` for its first ``layers`` layers, or all."""
    checkpoint_fn = select_checkpoint_fn(mode)
    model.checkpoint_layers, model.recompute_num_layers = checkpoint_fn is not None, layers
    model.checkpoint_fn = checkpoint_full if checkpoint_fn is None else checkpoint_fn


def checkpoint_full(run: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """A ``CheckpointFn`` that saves only the inputs."""
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **named)


def checkpoint_selective(run: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """A ``CheckpointFn`` that saves the inputs, attention outputs and matmul outputs."""
    contexts = partial(create_selective_checkpoint_contexts, _selective_policy)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named)


def _selective_policy(_: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_expensive(str(op)) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_expensive(op: str) -> bool:
    # A matmul with an ``out`` argument allocates nothing that could be saved.
    space, name, overload = (*op.split("."), "", "")[:3]
    matmul = space == "aten" and name in _MATMULS and overload == "default"
    return matmul or any(part in op for part in _ATTENTION)
