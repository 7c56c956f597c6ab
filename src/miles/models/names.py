"""Our parameter names and Hugging Face's: which tensors of a checkpoint make up each of ours.

All families here share one naming scheme on disk; they differ only in which tensors exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miles.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A Hugging Face tensor and the rows it fills of ours (of one expert's slab where ``expert`` is set)."""

    hf_name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    expert: int | None = None

    def of(self, tensor: Any) -> Any:
        """The part of our ``tensor`` that this piece is: a view."""
        slab = tensor if self.expert is None else tensor[self.expert]
        return slab if self.stop - self.start == len(slab) else slab[self.start : self.stop]


def shape_of(pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """The shape of the tensor of ours that the pieces fill."""
    last = pieces[-1]
    inner = (max(p.stop for p in pieces), *last.shape[1:])
    return inner if last.expert is None else (last.expert + 1, *inner)


def _fused(*parts: tuple[str, tuple[int, ...]], expert: int | None = None) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    start = 0
    for hf_name, shape in parts:
        pieces.append(Piece(hf_name, shape, start, start + shape[0], expert))
        start += shape[0]
    return tuple(pieces)


def _attention(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    width, d = spec.hidden_size, spec.head_dim
    rows = {"q": spec.num_heads * d, "k": spec.num_kv_heads * d, "v": spec.num_kv_heads * d}
    yield f"{ours}.qkv.weight", _fused(*((f"{theirs}.{x}_proj.weight", (n, width)) for x, n in rows.items()))
    if spec.qkv_bias:
        yield f"{ours}.qkv.bias", _fused(*((f"{theirs}.{x}_proj.bias", (n,)) for x, n in rows.items()))
    yield f"{ours}.output.weight", _fused((f"{theirs}.o_proj.weight", (width, spec.num_heads * d)))
    if spec.output_bias:
        yield f"{ours}.output.bias", _fused((f"{theirs}.o_proj.bias", (width,)))
    if spec.qk_norm:
        yield f"{ours}.q_norm.weight", _fused((f"{theirs}.q_norm.weight", (d,)))
        yield f"{ours}.k_norm.weight", _fused((f"{theirs}.k_norm.weight", (d,)))


def _mlp(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    width, inner = spec.hidden_size, spec.intermediate_size
    yield f"{ours}.gate_up.weight", _fused(*((f"{theirs}.{x}_proj.weight", (inner, width)) for x in ("gate", "up")))
    yield f"{ours}.down.weight", _fused((f"{theirs}.down_proj.weight", (width, inner)))
    if spec.mlp_bias:
        yield f"{ours}.gate_up.bias", _fused(*((f"{theirs}.{x}_proj.bias", (inner,)) for x in ("gate", "up")))
        yield f"{ours}.down.bias", _fused((f"{theirs}.down_proj.bias", (width,)))


def _moe(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    assert spec.moe is not None
    width, inner, count = spec.hidden_size, spec.moe.intermediate_size, spec.moe.num_experts
    yield f"{ours}.router.weight", _fused((f"{theirs}.gate.weight", (count, width)))
    gate_up: list[Piece] = []
    down: list[Piece] = []
    for e in range(count):
        name = f"{theirs}.experts.{e}"
        gate_up += _fused(*((f"{name}.{x}_proj.weight", (inner, width)) for x in ("gate", "up")), expert=e)
        down += _fused((f"{name}.down_proj.weight", (width, inner)), expert=e)
    yield f"{ours}.gate_up", tuple(gate_up)
    yield f"{ours}.down", tuple(down)


def pieces(spec: DecoderSpec) -> Mapping[str, tuple[Piece, ...]]:
    """Every parameter of ours, in the decoder's own order, and what it is made of on disk."""
    table: dict[str, tuple[Piece, ...]] = {}
    vocabulary = (spec.vocab_size, spec.hidden_size)
    table["embedding.weight"] = _fused(("model.embed_tokens.weight", vocabulary))
    for i in range(spec.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        table[f"{ours}.attention_norm.weight"] = _fused((f"{theirs}.input_layernorm.weight", (spec.hidden_size,)))
        table.update(_attention(spec, f"{ours}.attention", f"{theirs}.self_attn"))
        table[f"{ours}.mlp_norm.weight"] = _fused((f"{theirs}.post_attention_layernorm.weight", (spec.hidden_size,)))
        if i in spec.moe_layers:
            table.update(_moe(spec, f"{ours}.moe", f"{theirs}.mlp"))
        else:
            table.update(_mlp(spec, f"{ours}.mlp", f"{theirs}.mlp"))
    table["norm.weight"] = _fused(("model.norm.weight", (spec.hidden_size,)))
    if not spec.tie_embeddings:
        table["lm_head.weight"] = _fused(("lm_head.weight", vocabulary))
    return table


def stacked(spec: DecoderSpec) -> Mapping[str, str]:
    """Ours -> the Hugging Face name, for experts that a checkpoint keeps as one tensor shaped like ours."""
    return {
        f"layers.{i}.moe.{ours}": f"model.layers.{i}.mlp.experts.{ours}_proj"
        for i in spec.moe_layers
        for ours in ("gate_up", "down")
    }


def ignorable(spec: DecoderSpec, hf_name: str) -> bool:
    """May a checkpoint carry this tensor though no parameter of ours comes from it?

    Rotary buffers follow from the config; a head beside tied embeddings is a copy nobody reads.
    """
    return hf_name.endswith(".rotary_emb.inv_freq") or (hf_name == "lm_head.weight" and spec.tie_embeddings)
