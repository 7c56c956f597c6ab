"""Our attention backends behind transformers' attention interface, and a probe of what attention a model uses.

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

from miles.models.layers.attention_backend import AttentionBackend, AttentionInputs, AttentionParams
from miles.models.spec import AttentionSpec

NAME = "miles"
_PROBE = "miles_probe"

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class UnsupportedModelError(Exception):
    """Why the adapter cannot run a model: the end of a sentence that starts with the model."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """The mask of a model under the probe: the mask function itself instead of a matrix."""

    rule: MaskFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One layer's attention call, as the model made it."""

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
class BackendBinding:
    """Connects one model's attention modules to the attention backend of the current forward. ``params`` is by slot:
    the order of calls.

    Every module of the model references it, so that two models in one process never share one.
    """

    attn_backend: AttentionBackend | None = None
    params: list[AttentionParams] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)


@cache
def register() -> None:
    """Register both attention functions with transformers. ``miles`` has no mask function, so none is built."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(_PROBE, _record_call)
    AttentionMaskInterface.register(_PROBE, _rule)


def set_attention(model: Any, name: str) -> None:
    """Set the attention function of the language model; that of a vision tower stays as it is."""
    if getattr(model.config, "vision_config", None) is None:
        model.set_attn_implementation(name)
    else:
        model.set_attn_implementation({"": name, "text_config": name})


def attach_binding(model: Any, binding: BackendBinding) -> None:
    """Give every module of ``model`` the binding."""
    for module in model.modules():
        module.miles_binding = binding


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
    """Called by transformers in place of its own attention: queries [1, H, T, d] etc. in, [1, T, H, e] out."""
    binding: BackendBinding = module.miles_binding
    slot: int = module.miles_slot
    assert binding.attn_backend is not None and attention_mask is None
    q_THd, k_TGd, v_TGe = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    width = v_TGe.shape[-1]
    if width < k_TGd.shape[-1]:
        v_TGe = F.pad(v_TGe, (0, k_TGd.shape[-1] - width))  # the KV cache has one shape for keys and values
    out_THe = binding.attn_backend(slot, AttentionInputs(q_THd, k_TGd, v_TGe, binding.params[slot], s_aux))
    return out_THe[None, ..., :width], None


# -- the probe ------------------------------------------------------------------------------


def _rule(*, mask_function: MaskFunction, **_: Any) -> MaskRule:
    return MaskRule(mask_function)


def _record_call(
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
    binding: BackendBinding = module.miles_binding
    binding.calls.append(
        AttentionCall(
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
def probe_attention(
    model: Any, binding: BackendBinding, *, positions: int, chunk: int | None
) -> tuple[AttentionSpec, ...]:
    """Run the model once to find out what each of its attention layers does; returns their specs in slot order.

    ``positions`` is how far masks are evaluated, ``chunk`` is the chunk length in the config.
    """
    binding.calls.clear()
    set_attention(model, _PROBE)
    try:
        model(input_ids=torch.zeros(1, 3, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        set_attention(model, NAME)
    if not binding.calls:
        raise UnsupportedModelError("it does not compute attention through transformers' attention interface.")
    rules: dict[int, tuple[int | None, int | None]] = {}
    found: list[AttentionSpec] = []
    for slot, call in enumerate(binding.calls):
        if any(other.module is call.module for other in binding.calls[:slot]):
            raise UnsupportedModelError("one of its attention modules is called more than once for a token.")
        call.module.miles_slot = slot
        if id(call.mask) not in rules:
            rules[id(call.mask)] = _classify_mask(call.mask, torch.arange(positions, device=model.device), chunk)
        window, own_chunk = rules[id(call.mask)]
        found.append(_build_attention_spec(call, model.dtype, window=window, chunk=own_chunk))
        binding.params.append(
            AttentionParams(scale=_read_scale(call.scale), window=window, chunk=own_chunk, softcap=call.softcap)
        )
    binding.calls.clear()
    return tuple(found)


def _build_attention_spec(
    call: AttentionCall, dtype: torch.dtype, *, window: int | None, chunk: int | None
) -> AttentionSpec:
    if call.position_bias is not None:
        raise UnsupportedModelError("it adds a position bias to attention scores.")
    if call.value_dim > call.key_dim or call.heads % call.kv_heads:
        shape = f"{call.heads} queries and {call.kv_heads} keys of {call.key_dim} channels, values of {call.value_dim}"
        raise UnsupportedModelError(f"its attention has {shape}.")
    if call.sinks is not None and tuple(call.sinks.shape) != (call.heads,):
        raise UnsupportedModelError(f"its attention sinks have shape {tuple(call.sinks.shape)}, not one for each head.")
    if call.value_dtype != dtype:
        raise UnsupportedModelError(f"its attention is in {call.value_dtype}, though the model is in {dtype}.")
    return AttentionSpec(
        num_heads=call.heads,
        num_kv_heads=call.kv_heads,
        head_dim=call.key_dim,
        rope=None,
        window=window,
        chunk=chunk,
        softcap=call.softcap,
        sinks=call.sinks is not None,
        scale=_read_scale(call.scale),
    )


def _read_scale(scale: object) -> float:
    if not isinstance(scale, int | float):
        raise UnsupportedModelError(f"it scales attention scores by a {type(scale).__name__}, not by a number.")
    return float(scale)


def _classify_mask(mask: object, at_P: Tensor, chunk: int | None) -> tuple[int | None, int | None]:
    """Return the window or the chunk that fully describes a mask at any length; other masks are rejected."""
    if mask is None:
        return None, None
    if not isinstance(mask, MaskRule):
        raise UnsupportedModelError(f"it builds its own attention masks ({type(mask).__name__}).")
    last = len(at_P) - 1
    window = last + 1 - _first_visible(mask.rule, last, at_P)
    shuffled = random.Random(0)
    near = {edge + off for edge in (0, window, chunk or 0, last) for off in (-1, 0, 1)}
    rows = sorted({q for q in (*near, *(shuffled.randrange(last + 1) for _ in range(12))) if 0 <= q <= last})
    firsts = [_first_visible(mask.rule, q, at_P) for q in rows]
    if firsts == [0] * len(rows):
        return None, None
    if firsts == [max(0, q - window + 1) for q in rows]:
        return window, None
    if chunk is not None and firsts == [q // chunk * chunk for q in rows]:
        return None, chunk
    raise UnsupportedModelError("one of its attention masks is neither causal, nor a sliding window, nor chunked.")


def _first_visible(rule: MaskFunction, q: int, at_P: Tensor) -> int:
    """Return the first position that position ``q`` sees, if it sees exactly the range from there up to itself."""
    zero = torch.zeros((), dtype=torch.long, device=at_P.device)
    try:
        visible_P = torch.as_tensor(rule(zero, zero, at_P[q], at_P)).expand(len(at_P))
    except (IndexError, RuntimeError) as error:
        raise UnsupportedModelError("one of its attention masks depends on more than positions.") from error
    first = int(visible_P.to(torch.uint8).argmax())
    if not torch.equal(visible_P, (at_P >= first) & (at_P <= q)):
        raise UnsupportedModelError("one of its attention masks is neither causal, nor a sliding window, nor chunked.")
    return first
