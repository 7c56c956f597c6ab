"""How a decoder is cut across ranks: the smaller decoder each rank has, and which part of each tensor is its. No torch.

A rank has some of the heads, some of the inner channels of every MLP and expert, and some rows of the vocabulary, so
all its tensors make up an ordinary decoder of a smaller spec. What a layer's mixer or feed-forward part gives on one
rank is then a summand; added up over the ranks it is what the whole decoder has. Norms, routers and the short vectors
of latent attention are whole on every rank. Counts that do not divide are padded with rows of zeros, which add
nothing; heads are never padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from miles.core.errors import UsageError
from miles.models.foreign.spec import ForeignSpec
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaSpec,
    FeedForward,
    LayerSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MlpSpec,
    MoeSpec,
)

__all__ = ["Copied", "Part", "Share", "gathered", "misfit", "shares", "slice_of", "spec_of_rank"]


@dataclass(frozen=True, slots=True)
class Part:
    """``units`` of so many ``rows`` each, dealt out in order.

    Where ranks are more than units, those that ``repeat`` are had by several neighbours; others by the first ranks
    alone.
    """

    units: int
    rows: int = 1
    repeat: bool = False

    def held(self, world: int) -> int:
        """Units a rank holds, padding among them."""
        return -(-self.units // world)

    def bounds(self, rank: int, world: int) -> tuple[int, int]:
        """The first row of a rank and the one behind its last; fewer than ``held`` where the rest is padding."""
        if self.repeat and world > self.units:
            first = rank * self.units // world
            return first * self.rows, (first + 1) * self.rows
        first = min(rank * self.held(world), self.units)
        return first * self.rows, min(first + self.held(world), self.units) * self.rows


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows ``start`` to ``start + rows`` of a rank, which are one of ``units`` that neighbours share.

    ``first`` says that no rank before this one has them.
    """

    start: int
    rows: int
    unit: int
    units: int
    first: bool


@dataclass(frozen=True, slots=True)
class Share:
    """How one tensor is dealt out: dimension ``dim`` is cut into ``parts``, and each rank has some of each.

    Without parts every rank has all of it; with ``lone`` the first rank has and the others have zeros, as it must be
    for what is added once. A whole one inside a mixer or a feed-forward part ``sees`` a rank's own summand alone: in
    training its gradient is the sum over the ranks. ``stacked`` tensors have an expert a row of dimension 0.
    """

    dim: int = 0
    parts: tuple[Part, ...] = ()
    lone: bool = False
    sees: bool = False
    stacked: bool = False

    def of(self, tensor: Any, rank: int, world: int) -> Any:
        """What ``rank`` holds of ``tensor``: contiguous, and its own memory but where that is the whole tensor."""
        if self.lone and rank:
            return tensor.new_zeros(tensor.shape)
        if not self.parts or world == 1:
            return tensor
        held = sum(part.held(world) * part.rows for part in self.parts)
        out = tensor.new_zeros((*tensor.shape[: self.dim], held, *tensor.shape[self.dim + 1 :]))
        for there, here, count in self._runs(rank, world):
            out.narrow(self.dim, here, count).copy_(tensor.narrow(self.dim, there, count))
        return out

    def gathered(self, tensors: Sequence[Any]) -> Any:
        """The whole tensor again, from what the ranks hold, in order."""
        first = tensors[0]
        if not self.parts or len(tensors) == 1:
            return first
        size = sum(part.units * part.rows for part in self.parts)
        whole = first.new_empty((*first.shape[: self.dim], size, *first.shape[self.dim + 1 :]))
        for rank, tensor in enumerate(tensors):
            for there, here, count in self._runs(rank, len(tensors)):
                whole.narrow(self.dim, there, count).copy_(tensor.narrow(self.dim, here, count))
        return whole

    def copied(self, rank: int, world: int) -> list[Copied]:
        """The runs of rows along ``dim`` that other ranks have too."""
        out: list[Copied] = []
        here = 0
        for part in self.parts:
            rows = part.held(world) * part.rows
            if part.repeat and world > part.units:
                unit = rank * part.units // world
                first = rank == 0 or (rank - 1) * part.units // world < unit
                out.append(Copied(start=here, rows=rows, unit=unit, units=part.units, first=first))
            here += rows
        return out

    def _runs(self, rank: int, world: int) -> Iterable[tuple[int, int, int]]:
        """Where a run of rows starts in the whole and where on the rank, and how long it is."""
        there = here = 0
        for part in self.parts:
            start, stop = part.bounds(rank, world)
            if stop > start:
                yield there + start, here, stop - start
            there, here = there + part.units * part.rows, here + part.held(world) * part.rows


_BESIDE = Share()  # between a layer's parts, where the residual stream is whole
_WHOLE = Share(sees=True)
_LONE = Share(lone=True)

Shares = dict[str, Share]


def slice_of(spec: DecoderSpec, name: str, tensor: Any, rank: int, world: int) -> Any:
    """What ``rank`` of ``world`` holds of the whole decoder's parameter ``name``."""
    return shares(spec)[name].of(tensor, rank, world)


def gathered(spec: DecoderSpec, name: str, tensors: Sequence[Any]) -> Any:
    """The whole decoder's parameter ``name`` out of what the ranks hold, in order: the inverse of ``slice_of``."""
    return shares(spec)[name].gathered(tensors)


# -- the smaller spec -----------------------------------------------------------------------


def spec_of_rank(spec: DecoderSpec, world: int) -> DecoderSpec:
    """The decoder each of ``world`` ranks has; refuses what cannot be cut so. All ranks' are alike."""
    problem = misfit(spec, world)
    if problem is not None:
        raise UsageError(f"the model cannot be cut across {world} ranks: {problem}.")
    if world == 1:
        return spec
    layers = tuple(
        LayerSpec(
            mixer=_mixer_of_rank(layer.mixer, world), ffn=_ffn_of_rank(layer.ffn, world), post_norms=layer.post_norms
        )
        for layer in spec.layers
    )
    return replace(spec, vocab_size=Part(spec.vocab_size).held(world), layers=layers)


def _mixer_of_rank(mixer: Mixer | None, world: int) -> Mixer | None:
    match mixer:
        case AttentionSpec():
            kv_heads = Part(mixer.num_kv_heads).held(world)
            return replace(mixer, num_heads=mixer.num_heads // world, num_kv_heads=kv_heads)
        case MlaSpec():
            return replace(mixer, num_heads=mixer.num_heads // world)
        case DeltaSpec():
            return replace(mixer, key_heads=mixer.key_heads // world, value_heads=mixer.value_heads // world)
        case MambaSpec():
            return replace(mixer, num_heads=mixer.num_heads // world, groups=mixer.groups // world)
        case None:
            return None


def _ffn_of_rank(ffn: FeedForward | None, world: int) -> FeedForward | None:
    if ffn is None:
        return None
    inner = Part(ffn.size).held(world)
    if isinstance(ffn, MlpSpec):
        return replace(ffn, size=inner)
    shared = None if ffn.shared is None else replace(ffn.shared, size=Part(ffn.shared.size).held(world))
    return replace(ffn, size=inner, shared=shared)


def misfit(spec: DecoderSpec, world: int) -> str | None:
    """Why ``world`` ranks cannot share this model, if they cannot; for a sentence to go on with."""
    if world == 1:
        return None
    if isinstance(spec, ForeignSpec):
        return f"{spec.architecture} is computed by transformers as a whole"
    problems = ((i, _mixer_misfit(layer.mixer, world)) for i, layer in enumerate(spec.layers))
    return next((f"layer {i} has {problem}" for i, problem in problems if problem is not None), None)


def _mixer_misfit(mixer: Mixer | None, world: int) -> str | None:
    match mixer:
        case AttentionSpec() | MlaSpec():
            count, what = mixer.num_heads, "attention heads"
        case DeltaSpec():
            count, what = mixer.key_heads, "key heads in its delta network"
        case MambaSpec():
            count, what = mixer.groups, "groups of heads in its state"
        case None:
            return None
    if count % world:
        return f"{count} {what}, which they cannot divide evenly"
    if isinstance(mixer, AttentionSpec) and mixer.num_kv_heads % world and world % mixer.num_kv_heads:
        return f"{mixer.num_kv_heads} key-value heads, which they can neither divide nor repeat evenly"
    return None


# -- who has what of each parameter ---------------------------------------------------------


@lru_cache(maxsize=8)
def shares(spec: DecoderSpec) -> Mapping[str, Share]:
    """How each parameter of the whole decoder is dealt out, whatever the number of ranks."""
    vocabulary = _rows(Part(spec.vocab_size))
    table: Shares = {"embedding.weight": vocabulary}
    for i, layer in enumerate(spec.layers):
        table |= {f"layers.{i}.{name}": share for name, share in _layer(layer).items()}
    table["norm.weight"] = _BESIDE
    if not spec.tie_embeddings:
        table["lm_head.weight"] = vocabulary
    return table


def _layer(layer: LayerSpec) -> Shares:
    out: Shares = {}
    if layer.mixer is not None:
        out["attention_norm.weight"] = _BESIDE
        out |= _mixer(layer.mixer)
    if layer.ffn is not None:
        out["mlp_norm.weight"] = _BESIDE
        out |= _ffn(layer.ffn)
    if layer.post_norms:
        kinds = {"attention": layer.mixer, "mlp": layer.ffn}
        out |= {f"{kind}_post_norm.weight": _BESIDE for kind, there in kinds.items() if there is not None}
    return out


def _mixer(mixer: Mixer) -> Shares:
    match mixer:
        case AttentionSpec():
            return _under("attention", _attention(mixer))
        case MlaSpec():
            return _under("mla", _mla(mixer))
        case DeltaSpec():
            return _under("delta", _delta(mixer))
        case MambaSpec():
            return _under("mamba", _mamba(mixer))


def _ffn(ffn: FeedForward) -> Shares:
    return _under("mlp", _mlp(ffn)) if isinstance(ffn, MlpSpec) else _under("moe", _moe(ffn))


def _attention(spec: AttentionSpec) -> Shares:
    queries, keys = Part(spec.num_heads, spec.head_dim), Part(spec.num_kv_heads, spec.head_dim, repeat=True)
    gated = Part(spec.num_heads, 2 * spec.head_dim) if spec.gated else queries
    out = _linear("qkv", _rows(gated, keys, keys), bias=spec.qkv_bias)
    out |= _output("output", queries, bias=spec.output_bias)
    if spec.qk_norm in ("head", "all"):
        each = spec.qk_norm == "head"
        out["q_norm.weight"] = _WHOLE if each else _rows(queries)
        out["k_norm.weight"] = _WHOLE if each else _rows(keys)
    if spec.sinks:
        out["sinks"] = _rows(Part(spec.num_heads))
    return out


def _mla(spec: MlaSpec) -> Shares:
    queries = _rows(Part(spec.num_heads, spec.head_dim))
    if spec.query_rank is None:
        out = _linear("q", queries, bias=False)
    else:
        out = _linear("q_a", _WHOLE, bias=spec.bias) | _linear("q_b", queries, bias=False)
        out["q_a_norm.weight"] = _WHOLE
    out |= _linear("kv_a", _WHOLE, bias=spec.bias)
    out["kv_a_norm.weight"] = _WHOLE
    out |= _linear("kv_b", _rows(Part(spec.num_heads, spec.nope_dim + spec.value_dim)), bias=False)
    if spec.indexer is not None and spec.indexer.source is None:
        names = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
        out |= {f"indexer.{name}": _WHOLE for name in names}
    return out | _output("output", Part(spec.num_heads, spec.value_dim), bias=spec.bias)


def _delta(spec: DeltaSpec) -> Shares:
    keys, values = Part(spec.key_heads, spec.key_dim), Part(spec.value_heads, spec.value_dim)
    heads = Part(spec.value_heads)
    out: Shares = {}
    if spec.fused:
        share = spec.value_heads // spec.key_heads
        out["qkvz.weight"] = _rows(Part(spec.key_heads, 2 * (spec.key_dim + share * spec.value_dim)))
        out["ba.weight"] = _rows(Part(spec.key_heads, 2 * share))
    else:
        out["qkvz.weight"] = _rows(keys, keys, values, values)
        out["ba.weight"] = _rows(heads, heads)
    out |= {"conv": _rows(keys, keys, values), "dt_bias": _rows(heads), "A_log": _rows(heads), "norm.weight": _WHOLE}
    return out | _output("output", values, bias=False)


def _mamba(spec: MambaSpec) -> Shares:
    inner, both, heads = Part(spec.num_heads, spec.head_dim), Part(spec.groups, spec.state_dim), Part(spec.num_heads)
    out = _linear("input", _rows(inner, inner, both, both, heads), bias=spec.bias)
    out["conv"] = _rows(inner, both, both)
    if spec.conv_bias:
        out["conv_bias"] = _rows(inner, both, both)
    out |= {name: _rows(heads) for name in ("dt_bias", "A_log", "skip")}
    out["norm.weight"] = _rows(inner)
    return out | _output("output", inner, bias=spec.bias)


def _mlp(spec: MlpSpec) -> Shares:
    inner = Part(spec.size)
    if spec.gated:
        out = _linear("gate_up", _rows(inner, inner), bias=spec.bias)
    else:
        out = _linear("up", _rows(inner), bias=spec.bias)
    return out | _output("down", inner, bias=spec.bias)


def _moe(spec: MoeSpec) -> Shares:
    """Each expert is on all ranks with some of its channels, so no token goes to another rank for its experts."""
    inner = Part(spec.size)
    out: Shares = {"correction": _WHOLE} if spec.correction else {}
    out |= _linear("router", _WHOLE, bias=spec.router_bias)
    if spec.gated:
        parts = (Part(spec.size, 2),) if spec.interleaved else (inner, inner)
        first = out["gate_up"] = Share(dim=1, parts=parts, stacked=True)
    else:
        first = out["up"] = Share(dim=1, parts=(inner,), stacked=True)
    out["down"] = Share(dim=2, parts=(inner,), stacked=True)
    if spec.expert_bias:
        out |= {"gate_up_bias": first, "down_bias": Share(lone=True, stacked=True)}
    if spec.latent is not None:
        out |= _linear("into", _WHOLE, bias=spec.latent_bias)
        out["outof.weight"] = _WHOLE
        if spec.latent_bias:
            out["outof.bias"] = _LONE
    if spec.shared is not None:
        out |= _under("shared", _mlp(spec.shared))
        if spec.shared_gate:
            out["shared_gate.weight"] = _WHOLE
    return out


def _rows(*parts: Part) -> Share:
    return Share(parts=parts)


def _linear(name: str, rows: Share, *, bias: bool) -> Shares:
    """A projection whose outputs are dealt out."""
    return {f"{name}.weight": rows} | ({f"{name}.bias": rows} if bias else {})


def _output(name: str, inputs: Part, *, bias: bool) -> Shares:
    """A projection whose inputs are dealt out: what it gives is a summand, and its bias is added once."""
    return {f"{name}.weight": Share(dim=1, parts=(inputs,))} | ({f"{name}.bias": _LONE} if bias else {})


def _under(home: str, inner: Shares) -> Shares:
    return {f"{home}.{name}": share for name, share in inner.items()}
