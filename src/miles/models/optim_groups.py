"""Parameter groups of the optimizer: Muon-eligible matrices, and the parts of a vision tower. No torch.

Muon-eligible are matrices between hidden channels, and the matrices inside fused projections. Embeddings, heads, norms,
biases, convolutions, routers, other narrow gates and the vision tower are excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from miles.models.checkpoint.param_map import build_param_map, param_shape
from miles.models.checkpoint.param_slices import Shape
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    MoeSpec,
    RelativeAttentionSpec,
    ShortConvSpec,
)
from miles.models.vision.spec import CLIP_BOUNDS

# Rows of one matrix fused a fused tensor: start, stop, step.
Rows = tuple[int, int, int]

# Their outputs select, gate or scale: few rows, each with a meaning of its own.
_NARROW = (
    "router.weight",
    "attention.gate.weight",
    "relative.relative.weight",
    "relative.profiles",
    "attention_hyper.fn",
    "mlp_hyper.fn",
    "attention_hyper.inject",
    "mlp_hyper.inject",
    "ngram.table.weight",
    "delta.ba.weight",
    "kda.b.weight",
    "kda.A_log",
    "shared_gate.weight",
    "indexer.weights_proj.weight",
    "indexer.pool_bias",
    "moe.expert_table",
    "altup.prediction.weight",
    "altup.correction.weight",
    "altup.router.weight",
)

# Selected experts follow the load, or a table; indexers and fixed scales have no gradient either.
_UNTRAINED = (".moe.correction", ".moe.expert_table", ".ngram.multipliers", ".ngram.sizes", ".ngram.offsets")
_INDEXER = ".indexer."
_OUTPUT_SCALE = "output_scale"
_UNTRAINED_VISION = (*CLIP_BOUNDS, "std_bias", "std_scale")

_VISION = "vision."
# Modules of the vision tower that map its output to the decoder's embeddings.
_PROJECTORS = ("merger", "deepstack", "projector")


def is_vision_param(name: str) -> bool:
    """Return whether a parameter belongs to the vision tower or its projector."""
    return name.startswith(_VISION)


def is_projector_param(name: str) -> bool:
    """Return whether a parameter belongs to the projector, behind the vision tower."""
    return is_vision_param(name) and name.removeprefix(_VISION).split(".")[0] in _PROJECTORS


def is_untrained_param(name: str) -> bool:
    """Return whether a decoder never trains a parameter, given its name or that behind ``layers.N``.

    >>> is_untrained_param("layers.3.mla.indexer.wk.weight"), is_untrained_param("layers.3.altup.output_scale")
    (True, False)
    """
    if is_vision_param(name):
        return name.endswith(_UNTRAINED_VISION)
    module, _, last = name.rpartition(".")
    own = module.rpartition(".")[2]
    return name.endswith(_UNTRAINED) or _INDEXER in name or (last == _OUTPUT_SCALE and (not own or own.isdigit()))


def is_muon_param(name: str, axes: int) -> bool:
    """Return whether Muon updates a parameter of a decoder; Adam updates the others."""
    inner = not is_vision_param(name) and name.startswith("layers.") and axes > 1
    return inner and not name.endswith((*_NARROW, "bias")) and ".conv" not in name


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenVision:
    """Which parts of the vision tower are not trained.

    >>> sorted(FrozenVision(tower=True).select(["vision.blocks.0.x", "vision.merger.x", "norm.x"]))
    ['vision.blocks.0.x']
    """

    tower: bool = False
    projector: bool = False

    def select(self, names: Iterable[str]) -> frozenset[str]:
        """Return the parameters that are not trained."""
        return frozenset(
            name
            for name in names
            if is_vision_param(name) and (self.projector if is_projector_param(name) else self.tower)
        )


TRAINED_VISION = FrozenVision()
"""Everything is trained."""


@dataclass(frozen=True, slots=True)
class MuonMatrices:
    """A parameter of ``shape`` whose last two dimensions are matrices: those of ``rows``, concatenated.

    A third dimension in front counts experts.
    """

    shape: Shape
    rows: tuple[Rows, ...]


@lru_cache(maxsize=8)
def find_muon_matrices(spec: DecoderSpec) -> Mapping[str, MuonMatrices]:
    """Find every such parameter of the full decoder; empty for a model computed by transformers."""
    if isinstance(spec, HfAdapterSpec):
        return {}
    out: dict[str, MuonMatrices] = {}
    for name, parts in build_param_map(spec).items():
        shape = param_shape(parts)
        if not is_muon_param(name, len(shape)):
            continue
        _, number, own = name.split(".", 2)
        fused = _split_fused(spec.layers[int(number)], own)
        out[name] = MuonMatrices(shape, fused if fused is not None else ((0, shape[-2], 1),))
    return out


def _split_fused(layer: LayerSpec, name: str) -> tuple[Rows, ...] | None:
    """Return the matrices of a fused projection; None if it is a single matrix."""
    match name.removesuffix(".weight").split("."), layer.mixer, layer.ffn:
        case ["attention", "qkv"], AttentionSpec() as mixer, _:
            keys = mixer.num_kv_heads * mixer.head_dim
            own = (keys,) if mixer.value_from_key else (keys, keys)
            own = () if mixer.kv_source is not None else own
            return _consecutive(mixer.num_heads * mixer.head_dim * (2 if mixer.gated else 1), *own)
        case ["relative", "qkv"], RelativeAttentionSpec() as mixer, _:
            return _consecutive(mixer.num_heads * mixer.head_dim, *2 * (mixer.num_kv_heads * mixer.head_dim,))
        case ["compressed", *own], CompressedAttentionSpec() as mixer, _:
            return _split_compressed(own, mixer)
        case ["delta", "qkvz"], GatedDeltaNetSpec(fused=False) as mixer, _:
            keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
            return _consecutive(keys, keys, values, values)
        case ["kda", "qkv"], KimiDeltaSpec() as mixer, _:
            return _consecutive(*3 * (mixer.num_heads * mixer.head_dim,))
        case ["mamba", "input"], MambaSpec() as mixer, _:
            inner, state = mixer.num_heads * mixer.head_dim, mixer.groups * mixer.state_dim
            return _consecutive(inner, inner, state, state, mixer.num_heads)
        case ["short_conv", "input"], ShortConvSpec() as mixer, _:
            return _consecutive(mixer.channels, mixer.channels, mixer.channels)
        case [*_, "gate_up"], _, (MlpSpec() | MoeSpec()) as ffn:
            return _split_gates(name, ffn)
    return None


def _split_gates(name: str, ffn: MlpSpec | MoeSpec) -> tuple[Rows, ...]:
    """Return the gates and the ups of an MLP, of experts, or of a shared expert."""
    if isinstance(ffn, MoeSpec) and ffn.shared is not None and name.startswith("moe.shared."):
        ffn = ffn.shared
    twice = 2 * ffn.size
    return ((0, twice, 2), (1, twice, 2)) if ffn.interleaved else _consecutive(ffn.size, ffn.size)


def _split_compressed(name: Sequence[str], mixer: CompressedAttentionSpec) -> tuple[Rows, ...] | None:
    """Return the matrices of the groups of an output projection, or of the values and gates of a compressor."""
    if name == ["output_groups"]:
        return _consecutive(*mixer.output_groups * (mixer.output_rank,))
    if name[-1] != "kv_gate" or mixer.compressor is None:
        return None
    index = mixer.compressor.indexer if name[0] == "indexer" else None
    width = mixer.head_dim if index is None else index.head_dim
    return _consecutive(*2 * (width * (2 if mixer.compressor.overlap else 1),))


def _consecutive(*sizes: int) -> tuple[Rows, ...]:
    rows: list[Rows] = []
    start = 0
    for size in sizes:
        rows.append((start, start + size, 1))
        start += size
    return tuple(rows)
