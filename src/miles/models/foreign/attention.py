"""Our attention behind transformers' attention interface, and a survey of what a model asks of it.

Shapes: T tokens, H query heads, G key-value heads, d channels of a key, e of a value, P positions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.models.memory import Attend, Terms
from miles.models.spec import AttentionSpec

NAME = "miles"
_SURVEY = "miles_survey"

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Unfit(Exception):
    """Why a model cannot be held this way: the end of a sentence that starts with the model."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a model makes of its mask under the survey: the rule itself, by positions, instead of a matrix."""

    rule: MaskFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One layer's attention as the model asked for it."""

    module: Any
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    value_dtype: torch.dtype
    scale: object
    softcap: float | None
    sinks: Tensor | None
    mask: object
    position_bias: object


@dataclass(slots=True)
class Line:
    """The line from one model's attention modules to whoever remembers. ``terms`` is by slot: the order of calls.

    Every module of the model holds it, so that two models in one process never meet.
    """

    attend: Attend | None = None
    terms: list[Terms] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


@cache
def register() -> None:
    """Make both attentions known to transformers. ``miles`` has no mask of its own, so none is ever built for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(_SURVEY, _recorded)
    AttentionMaskInterface.register(_SURVEY, _rule)


def hang(model: Any, line: Line) -> None:
    """Give every module of ``model`` the line."""
    for module in model.modules():
        module.miles_line = line


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: [1, H, T, d] queries, and so on, in; [1, T, H, e] out."""
    line: Line = module.miles_line
    slot: int = module.miles_slot
    assert line.attend is not None and attention_mask is None
    q_THd, k_TGd, v_TGe = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    width = v_TGe.shape[-1]
    if width < k_TGd.shape[-1]:
        v_TGe = F.pad(v_TGe, (0, k_TGd.shape[-1] - width))  # one shape for keys and values, as caches are laid out
    out_THe = line.attend(slot, q_THd, k_TGd, v_TGe, line.terms[slot], sinks_H=s_aux)
    return out_THe[None, ..., :width], None


# -- the survey -----------------------------------------------------------------------------


def _rule(*, mask_function: MaskFunction, **_: Any) -> Seen:
    return Seen(mask_function)


def _recorded(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: object = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: object = None,
    **_: Any,
) -> tuple[Tensor, None]:
    line: Line = module.miles_line
    line.calls.append(
        Call(
            module=module,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            value_dtype=value.dtype,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=s_aux,
            mask=attention_mask,
            position_bias=position_bias,
        )
    )
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


@torch.no_grad()
def survey(model: Any, line: Line, *, positions: int, chunk: int | None) -> tuple[AttentionSpec, ...]:
    """Run the model once to learn what each of its attentions is; gives them in the order of their slots.

    ``positions`` is how far masks are looked at, ``chunk`` how long the config says chunks are.
    """
    line.calls.clear()
    model.set_attn_implementation(_SURVEY)
    try:
        model(input_ids=torch.zeros(1, 3, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(NAME)
    if not line.calls:
        raise Unfit("it does not compute attention through transformers' attention interface.")
    rules: dict[int, tuple[int | None, int | None]] = {}
    found: list[AttentionSpec] = []
    for slot, call in enumerate(line.calls):
        if any(other.module is call.module for other in line.calls[:slot]):
            raise Unfit("one of its attention modules is called more than once for a token.")
        call.module.miles_slot = slot
        if id(call.mask) not in rules:
            rules[id(call.mask)] = _sight(call.mask, torch.arange(positions, device=model.device), chunk)
        window, own_chunk = rules[id(call.mask)]
        found.append(_described(call, model.dtype, window=window, chunk=own_chunk))
        line.terms.append(Terms(scale=_number(call.scale), window=window, chunk=own_chunk, softcap=call.softcap))
    line.calls.clear()
    return tuple(found)


def _described(call: Call, dtype: torch.dtype, *, window: int | None, chunk: int | None) -> AttentionSpec:
    if call.position_bias is not None:
        raise Unfit("it adds a bias of positions to attention scores.")
    if call.value_dim > call.key_dim or call.heads % call.kv_heads:
        shape = f"{call.heads} queries and {call.kv_heads} keys of {call.key_dim} channels, values of {call.value_dim}"
        raise Unfit(f"its attention has {shape}.")
    if call.sinks is not None and tuple(call.sinks.shape) != (call.heads,):
        raise Unfit(f"its attention sinks have shape {tuple(call.sinks.shape)}, not one for each head.")
    if call.value_dtype != dtype:
        raise Unfit(f"its attention is in {call.value_dtype}, though the model is in {dtype}.")
    return AttentionSpec(
        num_heads=call.heads,
        num_kv_heads=call.kv_heads,
        head_dim=call.key_dim,
        rope=None,
        window=window,
        chunk=chunk,
        softcap=call.softcap,
        sinks=call.sinks is not None,
        scale=_number(call.scale),
    )


def _number(scale: object) -> float:
    if not isinstance(scale, int | float):
        raise Unfit(f"it scales attention scores by a {type(scale).__name__}, not by a number.")
    return float(scale)


def _sight(mask: object, at_P: Tensor, chunk: int | None) -> tuple[int | None, int | None]:
    """The window or the chunk that says all of a mask, whatever the lengths; masks that say more are refused."""
    if mask is None:
        return None, None
    if not isinstance(mask, Seen):
        raise Unfit(f"it makes attention masks of its own ({type(mask).__name__}).")
    last = len(at_P) - 1
    window = last + 1 - _first(mask.rule, last, at_P)
    shuffled = random.Random(0)
    near = {edge + off for edge in (0, window, chunk or 0, last) for off in (-1, 0, 1)}
    rows = sorted({q for q in (*near, *(shuffled.randrange(last + 1) for _ in range(12))) if 0 <= q <= last})
    firsts = [_first(mask.rule, q, at_P) for q in rows]
    if firsts == [0] * len(rows):
        return None, None
    if firsts == [max(0, q - window + 1) for q in rows]:
        return window, None
    if chunk is not None and firsts == [q // chunk * chunk for q in rows]:
        return None, chunk
    raise Unfit("one of its attention masks is neither causal, nor a sliding window, nor in chunks.")


def _first(rule: MaskFunction, q: int, at_P: Tensor) -> int:
    """The first position that position ``q`` sees, if it sees all from there up to itself and nothing else."""
    zero = torch.zeros((), dtype=torch.long, device=at_P.device)
    try:
        seen_P = torch.as_tensor(rule(zero, zero, at_P[q], at_P)).expand(len(at_P))
    except (IndexError, RuntimeError) as error:
        raise Unfit("one of its attention masks depends on more than positions.") from error
    first = int(seen_P.to(torch.uint8).argmax())
    if not torch.equal(seen_P, (at_P >= first) & (at_P <= q)):
        raise Unfit("one of its attention masks is neither causal, nor a sliding window, nor in chunks.")
    return first
