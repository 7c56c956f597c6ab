"""What a layer keeps of its forward pass when backward computes the rest again.

    none       everything autograd asks for
    selective  its input, what attention gave, and the products of matrices
    full       its input alone

Products and attention are nearly all of a layer's time, and what lies between them (norms, rotations, activations,
casts: the input of every product) is half or more of what it keeps. Selective gives that up and computes it again from
the products. Full repeats the products too: a third more time, and the least memory. What ranks add up or hand each
other within a layer is done again by all of them under both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "selective", "full"]
Again = Callable[..., Any]
"""Calls what it is given with the arguments behind it, so that backward may call it once more."""

# By name, as not every build of torch has all of them. Products of batches are none of these: they are what attention
# and recurrences are written out with, and grow with the square of a length.
_PRODUCTS = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
_ATTENTION = ("scaled_dot_product", "varlen_attn", "flash_attention", "efficient_attention")


def again_of(how: Recompute) -> Again | None:
    """How layers run so that backward can run them again; None where it need not."""
    return {"none": None, "selective": keep_products, "full": keep_nothing}[how]


class Recomputing(Protocol):
    """A model whose layers can run again: with ``checkpoint_layers`` they do, as ``again`` has them, the first
    ``again_layers`` of them or all."""

    checkpoint_layers: bool
    again: Again
    again_layers: int | None


def set_recompute(model: Recomputing, how: Recompute, layers: int | None = None) -> None:
    """Let ``model`` compute so much again in backward: in its first ``layers``, or in all."""
    again = again_of(how)
    model.checkpoint_layers, model.again_layers = again is not None, layers
    model.again = keep_nothing if again is None else again


def wrap(layer: Callable[..., Tensor], how: Recompute) -> Callable[..., Tensor]:
    """The same layer, which keeps less."""
    again = again_of(how)
    return layer if again is None else partial(again, layer)


def keep_nothing(run: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """An ``Again`` that keeps the inputs alone."""
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **named)


def keep_products(run: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """An ``Again`` that keeps the inputs, what attention gave and the products of matrices."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named)


def _policy(_: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _dear(str(op)) else CheckpointPolicy.PREFER_RECOMPUTE


def _dear(op: str) -> bool:
    # A product that writes into a tensor it is given has nothing of its own to keep.
    space, name, overload = (*op.split("."), "", "")[:3]
    products = space == "aten" and name in _PRODUCTS and overload == "default"
    return products or any(part in op for part in _ATTENTION)
