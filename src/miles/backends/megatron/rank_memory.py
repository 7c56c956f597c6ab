"""Memory of one Megatron rank: its pipeline stage's parameters, gradient buffers and optimizer ranges. No torch.

Without the distributed optimizer a rank holds its part of every layer of its stage; data-parallel ranks hold the same.
With it, parameters and gradients lie in buffers, in reverse order of Megatron's modules and with Megatron's padding,
and each data-parallel rank updates an even range of every bucket. Experts have buffers of their own, and are once more
held as stacked copies. Padding is that of Megatron-Core without Transformer Engine, whose norms come in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil, lcm, prod

from miles.backends.megatron.module_choice import FFN_NAMES, MIXER_NAMES, AdaptedPart, ModuleChoice, choose_modules
from miles.cluster.parallel_dims import ParallelDims
from miles.models.accounting.params import (
    BYTES,
    RankParam,
    ShardingDegrees,
    list_rank_params,
    optimizer_state_bytes,
)
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import param_shape
from miles.models.optim_groups import TRAINED_VISION, FrozenVision, is_vision_param
from miles.models.parallel.tp_sharding import compute_tp_shards, shard_spec
from miles.models.quantization import plan_quantization
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlaSpec, MoeSpec

# Order of the parts of Megatron's layer, and of the parameters of its own modules; names behind ``layers.N.``, of a
# prefix all by the order below it. A part of the decoder's module has its parameters one after the other.
_PART_ORDER = (
    "output_scale",
    "attention_norm",
    "mixer",
    "attention_conv",
    "attention_post_norm",
    "mlp_norm",
    "ffn",
    "mlp_conv",
    "mlp_post_norm",
    "ngram",
    "altup",
    "laurel",
    "attention_hyper",
    "mlp_hyper",
    "per_layer",
)
_LAYER_ORDER = (
    "attention_norm",
    "attention.output",
    "mla.output",
    "attention.qkv",
    "mla.q.",
    "mla.q_a.",
    "mla.q_b.",
    "mla.kv_a.",
    "mla.kv_b.",
    "attention.q_norm",
    "mla.q_a_norm",
    "attention.k_norm",
    "mla.kv_a_norm",
    "mlp_norm",
    "mlp.gate_up",
    "mlp.down",
    "moe.router",
    "moe.correction",
    "moe.gate_up",
    "moe.down",
    "moe.shared_gate",
    "moe.shared.gate_up",
    "moe.shared.down",
)
# Order of the parameters of the decoder's modules: those of a module itself are in front of those of modules in it.
_DECODER_ORDER = {
    "attention": ("sinks", "qkv.", "output.", "gate.", "q_norm.", "k_norm.", "indexer."),
    "relative": ("profiles", "qkv.", "relative.", "kv_conv.", "q_norm.", "k_norm.", "output."),
    "mla": ("q.", "q_a.", "q_a_norm.", "q_b.", "kv_a.", "kv_a_norm.", "kv_b.", "output.", "indexer."),
    "compressed": (
        "sinks",
        "q_a.",
        "q_a_norm.",
        "q_b.",
        "kv.",
        "kv_norm.",
        "output_groups.",
        "output.",
        "compressor.position_bias",
        "compressor.kv_gate.",
        "compressor.norm.",
        "indexer.",
    ),
    "delta": ("conv", "dt_bias", "A_log", "qkvz.", "ba.", "norm.", "output."),
    "kda": ("conv", "dt_bias", "A_log", "qkv.", "f_a.", "f_b.", "b.", "g_a.", "g_b.", "norm.", "output."),
    "mamba": ("conv", "conv_bias", "dt_bias", "A_log", "skip", "input.", "norm.", "output."),
    "short_conv": ("conv", "conv_bias", "input.", "output."),
    "mlp": ("scale", "gate_up.", "up.", "down."),
    "moe": (
        "correction",
        "expert_table",
        "gate_up",
        "up",
        "down",
        "gate_up_bias",
        "down_bias",
        "router_scale",
        "expert_scale",
        "router.",
        "into.",
        "outof.",
        "shared_experts.factor",
        "shared_experts.gate_up",
        "shared_experts.down",
        "shared.gate_up.",
        "shared.up.",
        "shared.down.",
        "shared_gate.",
        "expert_norm.",
        "expert_post_norm.",
        "shared_post_norm.",
    ),
    "ngram": (
        "multipliers",
        "sizes",
        "offsets",
        "conv",
        "table.",
        "key.",
        "value.",
        "key_norm.",
        "query_norm.",
        "conv_norm.",
    ),
    "altup": ("output_scale", "prediction.", "correction.", "router.", "router_norm."),
    "laurel": ("left.", "right.", "norm."),
    "attention_hyper": ("fn", "base", "scale", "down", "up", "inject", "norm."),
    "mlp_hyper": ("fn", "base", "scale", "down", "up", "inject", "norm."),
    "per_layer": ("gate.", "projection.", "norm."),
}
_EXPERTS = (".moe.gate_up", ".moe.down")
_EMBEDDING = "embedding.weight"
_NORM = "norm.weight"
_HEAD = "lm_head.weight"
# What makes and joins residual streams and the inputs of layers, on the first stage and on the last.
_FIRST_STREAMS = ("per_layer.", "altup.projections.")
_LAST_STREAMS = ("altup.unembed_projections.", "hyper_head.")
_EMBEDDING_NORM = "embedding_norm.weight"
_ROUTER = ".moe.router.weight"
# Megatron aligns parameters and buckets in its buffers to as many values.
_PARAM_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_MASTER_BYTES = 4
_MOMENT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronMemoryFlags:
    """Those of Megatron's flags that decide what a rank holds.

    ``first`` and ``last`` are the layers of the first and last stage, ``virtual`` the stages of one rank, which take
    turns after ``group`` micro-batches. The latents of MLA are ``sharded_latents`` over tensor-parallel ranks except
    with Transformer Engine and batch-invariant layers. ``adapted`` parts are the decoder's modules, as
    ``choose_modules`` has them.
    """

    distributed_optimizer: bool = False
    virtual: int = 1
    group: int | None = None
    first: int | None = None
    last: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False
    frozen_router: bool = False
    sharded_latents: bool = True
    adapted: frozenset[AdaptedPart] = frozenset()


_FLAGS = {
    "use_distributed_optimizer": "distributed_optimizer",
    "virtual_pipeline_model_parallel_size": "virtual",
    "num_virtual_stages_per_pipeline_rank": "virtual",
    "microbatch_group_size_per_vp_stage": "group",
    "microbatch_group_size_per_virtual_pipeline_stage": "group",
    "num_layers_in_first_pipeline_stage": "first",
    "decoder_first_pipeline_num_layers": "first",
    "num_layers_in_last_pipeline_stage": "last",
    "decoder_last_pipeline_num_layers": "last",
    "account_for_embedding_in_pipeline_split": "counts_embedding",
    "account_for_loss_in_pipeline_split": "counts_loss",
    "moe_router_freeze_gate": "frozen_router",
}


def parse_memory_flags(words: Sequence[str], *, sharded_latents: bool = True) -> MegatronMemoryFlags:
    """Read those of Megatron's flags that decide what a rank holds; the others are Megatron's own affair.

    >>> parse_memory_flags(["--use-distributed-optimizer", "--num-layers-in-first-pipeline-stage", "3"]).first
    3
    """
    found: dict[str, int | bool] = {}
    for place, word in enumerate(words):
        flag, _, value = word.removeprefix("--").partition("=")
        field = _FLAGS.get(flag.replace("-", "_")) if word.startswith("--") else None
        if field is None:
            continue
        following = words[place + 1] if place + 1 < len(words) else ""
        value = value or ("" if following.startswith("--") else following)
        if value.isdigit():
            found[field] = int(value)
        elif field not in ("virtual", "group", "first", "last"):  # a wrong number is an error of Megatron's parser
            found[field] = value.lower() in ("", "true")
    return replace(MegatronMemoryFlags(sharded_latents=sharded_latents), **found)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank holds of a model, without activations."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """How a model is held: its dtype, and whether it is trained.

    ``scalar_head`` is the number of values of each parameter of a float32 head on the last stage, with which the
    decoder's own head, unless it is the embedding, is not trained; nor are ``frozen_vision`` parts.
    """

    dtype: str
    trained: bool = True
    moments: str = "float32"
    optimizer: str = "adam"
    scalar_head: tuple[int, ...] = ()
    frozen_vision: FrozenVision = TRAINED_VISION


def compute_rank_bytes(
    spec: DecoderSpec, layout: ParallelDims, flags: MegatronMemoryFlags, held: HeldModel, rank: int
) -> RankBytes:
    """Compute what ``rank`` of the layout holds of a model."""
    per_stage = layout.world // layout.pipeline
    return _list_stage_bytes(spec, layout, flags, held, rank // per_stage)[rank % per_stage]


def compute_fullest_rank_bytes(
    spec: DecoderSpec, layout: ParallelDims, flags: MegatronMemoryFlags, held: HeldModel, stage: int | None = None
) -> RankBytes:
    """Compute what the fullest rank holds, of a pipeline ``stage`` or of all."""
    numbers = range(layout.pipeline) if stage is None else (stage,)
    stages = (_list_stage_bytes(spec, layout, flags, held, number) for number in numbers)
    return max((rank for ranks in stages for rank in ranks), key=lambda rank: rank.total)


@lru_cache(maxsize=64)
def _list_stage_bytes(
    spec: DecoderSpec, layout: ParallelDims, flags: MegatronMemoryFlags, held: HeldModel, stage: int
) -> tuple[RankBytes, ...]:
    """List what each rank of a pipeline stage holds."""
    chunks = [[_freeze(p, flags, held) for p in chunk] for chunk in list_stage_params(spec, layout, flags, stage)]
    if held.scalar_head and stage == layout.pipeline - 1:
        chunks[-1] += [RankParam(f"head.{i}", n, n, 1, held.trained, 4) for i, n in enumerate(held.scalar_head)]
    count = layout.world // layout.pipeline
    if held.trained and flags.distributed_optimizer:
        return tuple(_sum_buffers(chunks, spec, layout, held, count, _find_experts(spec, flags.adapted)))
    params = [param for chunk in chunks for param in chunk]
    trained = [param for param in params if param.trained]
    optimizer = sum(optimizer_state_bytes(p, moments=held.moments, optimizer=held.optimizer) for p in trained)
    if BYTES[held.dtype] < 4:
        optimizer += _MASTER_BYTES * sum(param.count for param in trained if param.size is None)
    gradients = 4 * sum(param.count for param in trained)
    return (RankBytes(_sum_bytes(params, held), gradients, optimizer),) * count


def _freeze(param: RankParam, flags: MegatronMemoryFlags, held: HeldModel) -> RankParam:
    frozen = not held.trained or (flags.frozen_router and param.name.endswith(_ROUTER))
    frozen = frozen or bool(held.frozen_vision.select([param.name]))
    return replace(param, trained=False) if frozen or (held.scalar_head and param.name == _HEAD) else param


def _sum_bytes(params: Iterable[RankParam], held: HeldModel) -> int:
    return sum(param.count * (param.size or BYTES[held.dtype]) for param in params)


# -- pipeline stages ------------------------------------------------------------------------


def list_stage_params(
    spec: DecoderSpec, layout: ParallelDims, flags: MegatronMemoryFlags, stage: int
) -> list[list[RankParam]]:
    """List the parameters that a rank of a pipeline stage holds, of each of its virtual stages in Megatron's order."""
    params = {p.name: p for p in list_rank_params(spec, ShardingDegrees(tensor=layout.tensor))}
    own = layout.expert_tensor or layout.tensor
    if own != layout.tensor:
        experts = list_rank_params(spec, ShardingDegrees(tensor=own))
        params |= {param.name: param for param in experts if param.name.endswith(_EXPERTS)}
    params = {name: _shard_megatron(param, spec, layout, flags) for name, param in params.items()}
    params |= {param.name: param for param in _list_packed_params(params, spec, layout)}
    names: dict[int, list[str]] = {}
    for name in params:
        if name.startswith("layers."):
            names.setdefault(int(name.split(".")[1]), []).append(name)
    out: list[list[RankParam]] = []
    for number, layers in enumerate(split_layers(spec.num_layers, layout.pipeline, flags)[stage]):
        first = stage == 0 and number == 0
        last = stage == layout.pipeline - 1 and number == flags.virtual - 1
        found = [_EMBEDDING] if first else []
        for i in layers:
            place = partial(_find_place, choose_modules(spec, flags.adapted), spec.layers[i])
            found += sorted(names.get(i, ()), key=place)
        if last:
            head = _EMBEDDING if spec.tie_embeddings else _HEAD
            found += [_NORM] if spec.has_final_norm else []
            found += [] if spec.tie_embeddings and first else [head]
        if first:
            found += [_EMBEDDING_NORM] if spec.embedding_norm else []
            found += [name for name in params if is_vision_param(name)]
        streams = (_FIRST_STREAMS if first else ()) + (_LAST_STREAMS if last else ())
        found += sorted((name for name in params if name.startswith(streams)), key=_order_streams) if streams else []
        out.append([params[name] for name in found])
    return out


def _find_place(modules: ModuleChoice, layer: LayerSpec, name: str) -> tuple[int, int, bool]:
    """Return the place of a parameter in Megatron's layer: that of its part, and in it; biases follow their weights."""
    suffix = name.split(".", 2)[2]
    module, _, inner = suffix.partition(".")
    part = "mixer" if module in MIXER_NAMES else "ffn" if module in FFN_NAMES else module
    place = _PART_ORDER.index(part)
    if part == "mlp_norm" and isinstance(layer.ffn, MoeSpec) and layer.ffn.beside_mlp:
        place = _PART_ORDER.index("ffn")  # in the decoder's experts, behind these
        return place, len(_DECODER_ORDER["moe"]), False
    is_own = module in _DECODER_ORDER and (part not in ("mixer", "ffn") or modules.has_param(name))
    within = _find_prefix(_DECODER_ORDER[module], inner) if is_own else _find_prefix(_LAYER_ORDER, suffix, loose=True)
    return place, within, name.endswith("bias")


def _find_prefix(order: Sequence[str], name: str, *, loose: bool = False) -> int:
    """Return which entry is the name, or the module that it is in; if ``loose`` any prefix; else behind all."""
    found = (
        i for i, entry in enumerate(order) if name == entry or (name.startswith(entry) and (loose or "." in entry))
    )
    return next(found, len(order))


def _order_streams(name: str) -> tuple[int, int]:
    """Return the place of a parameter among those that make and join residual streams."""
    module, _, inner = name.partition(".")
    order = _DECODER_ORDER["attention_hyper"] if module == "hyper_head" else ()
    return ("per_layer", "altup", "hyper_head").index(module), _find_prefix(order, inner)


@lru_cache(maxsize=16)
def _find_experts(spec: DecoderSpec, adapted: frozenset[AdaptedPart]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parameters of experts, and those of them of which Megatron has a tensor for each expert."""
    modules = choose_modules(spec, adapted)
    stacked = frozenset(
        name for name, shard in compute_tp_shards(spec).items() if shard.stacked and modules.has_param(name)
    )
    names = (f"layers.{i}{suffix}" for i in spec.moe_layers for suffix in _EXPERTS)
    each = frozenset(name for name in names if not modules.has_param(name))
    return stacked | each, each


def split_layers(layers: int, stages: int, flags: MegatronMemoryFlags) -> list[list[range]]:
    """Return the layers of each pipeline rank, by its virtual stages."""
    sizes = [[0] * flags.virtual for _ in range(stages)]
    ends = {0: flags.first, stages - 1: flags.last}
    ends = {} if stages == 1 else {stage: count for stage, count in ends.items() if count is not None}
    counted = layers - sum(ends.values()) + flags.counts_embedding + flags.counts_loss
    each, rest = divmod(counted, max(1, stages - len(ends)))  # Megatron refuses a rest
    for stage in range(stages):
        whole = ends.get(stage, each + (stage < rest))
        share, more = divmod(whole, flags.virtual)
        sizes[stage] = [share + (number < more) for number in range(flags.virtual)]
    sizes[0][0] -= flags.counts_embedding
    sizes[-1][-1] -= flags.counts_loss
    out: list[list[range]] = [[] for _ in range(stages)]
    start = 0
    for number in range(flags.virtual):
        for stage in range(stages):
            out[stage].append(range(start, start + sizes[stage][number]))
            start += sizes[stage][number]
    return out


def _shard_megatron(param: RankParam, spec: DecoderSpec, layout: ParallelDims, flags: MegatronMemoryFlags) -> RankParam:
    """Return a parameter as Megatron shards it, given its tensor-parallel part in the decoder's sharding."""
    count = param.count
    if param.name in _find_experts(spec, flags.adapted)[0]:
        count //= layout.expert
    elif choose_modules(spec, flags.adapted).has_param(param.name):
        pass  # sharded as in the decoder
    elif ".attention.qkv." in param.name and not is_vision_param(
        param.name
    ):  # even rows, also with more ranks than key-value heads
        mixer = spec.layers[int(param.name.split(".")[1])].mixer
        assert isinstance(mixer, AttentionSpec)
        rows = (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
        width = spec.hidden_size if param.axes == 2 else 1
        count = ceil(rows / layout.tensor) * width
    elif flags.sharded_latents and param.name.endswith((".mla.q_a.weight", ".mla.kv_a.weight")):
        mixer = spec.layers[int(param.name.split(".")[1])].mixer
        assert isinstance(mixer, MlaSpec)
        rows = mixer.query_rank if param.name.endswith(".q_a.weight") else mixer.kv_rank + mixer.rope_dim
        assert rows is not None
        count = ceil(rows / layout.tensor) * spec.hidden_size
    return replace(param, count=count, gathered=count)


def _list_packed_params(
    params: Mapping[str, RankParam], spec: DecoderSpec, layout: ParallelDims
) -> Iterator[RankParam]:
    """Yield the packed parameters of a rank, of which the values are bytes."""
    rank_spec = shard_spec(spec, layout.tensor)
    packed = {name: each for name, each in plan_quantization(rank_spec).items() if each.packed}
    slices = build_param_map(rank_spec) if packed else {}
    for name, each in packed.items():
        *stack, rows, columns = param_shape(slices[name])
        size = each.format.stored_bytes(rows, columns, each.segments, each.tensor_parallel_size)
        count = prod(stack) // (layout.expert if stack else 1) * size
        yield replace(params[name], count=count, gathered=count, trained=False, size=1)


# -- the distributed optimizer --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BufferEntry:
    """A tensor of a module in a buffer; the tied embedding of several stages has a bucket of its own."""

    count: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer's padded size, and how many values each of the ranks that share it updates."""

    size: int
    owned: tuple[int, ...]


def _sum_buffers(
    chunks: Sequence[Sequence[RankParam]],
    spec: DecoderSpec,
    layout: ParallelDims,
    held: HeldModel,
    ranks: int,
    experts: tuple[frozenset[str], frozenset[str]],
) -> Iterator[RankBytes]:
    """Sum what each rank of a stage holds, whose parameters, gradients and states are in buffers."""
    every, each = experts
    size = BYTES[held.dtype]
    own = layout.expert_tensor or layout.tensor
    dense_ranks = ranks // layout.tensor
    expert_ranks = max(1, ranks // (own * layout.expert))
    weights = gradients = 0
    states_of: dict[bool, list[list[int]]] = {False: [], True: []}
    for chunk in chunks:
        for is_expert, width in ((False, None), (False, 4), (True, None)):
            params = [p for p in chunk if p.trained and (p.name in every) is is_expert and p.size == width]
            if not params:
                continue
            shared = expert_ranks if is_expert else dense_ranks
            buffer = _build_buffer(_list_entries(params, spec, layout, each), shared)
            weights += buffer.size * (width or size)
            gradients += 4 * buffer.size
            state = _MOMENT_BYTES + (_MASTER_BYTES if (width or size) < 4 else 0)
            states_of[is_expert].append([state * count for count in buffer.owned])
    weights += _sum_bytes((p for chunk in chunks for p in chunk if not p.trained), held)
    copies = (p for chunk in chunks for p in chunk if p.trained and p.name in each)
    weights += _sum_bytes(copies, held)
    for rank in range(ranks):
        dense = sum(states[rank // layout.tensor] for states in states_of[False])
        of_experts = sum(states[rank // (own * layout.expert)] for states in states_of[True])
        yield RankBytes(weights, gradients, dense + of_experts)


def _list_entries(
    params: Sequence[RankParam], spec: DecoderSpec, layout: ParallelDims, by_expert: frozenset[str]
) -> list[_BufferEntry]:
    """List the tensors of modules in Megatron's order: an expert of Megatron's has its own, up and down after each
    other.
    """
    moe = spec.moe
    out: list[_BufferEntry] = []
    for place, param in enumerate(params):
        if param.name not in by_expert:
            alone = param.name == _EMBEDDING and spec.tie_embeddings and layout.pipeline > 1
            out.append(_BufferEntry(param.count, alone))
        elif param.name.endswith(_EXPERTS[0]):
            assert isinstance(moe, MoeSpec)
            count = moe.num_experts // layout.expert
            out += [_BufferEntry(param.count // count), _BufferEntry(params[place + 1].count // count)] * count
    return out


def _build_buffer(entries: Sequence[_BufferEntry], ranks: int) -> _Buffer:
    """Lay tensors out as Megatron does, last first, and distribute each bucket over the ranks."""
    align = lcm(ranks, _BUCKET_ALIGNMENT)
    owned = [0] * ranks
    start = bucket = 0
    spans: list[tuple[int, int]] = []

    def close(end: int) -> int:
        """End the bucket; returns where the next one starts."""
        nonlocal spans
        stop = _round_up(end, align)
        share = (stop - bucket) // ranks
        for low, high in spans:
            for rank in range((low - bucket) // share, -(-(high - bucket) // share)):
                begin = bucket + rank * share
                owned[rank] += min(high, begin + share) - max(low, begin)
        spans = []
        return stop

    for entry in reversed(entries):
        start = _round_up(start, _PARAM_ALIGNMENT)
        if entry.alone and spans:
            start = bucket = close(start)
        spans.append((start, start + entry.count))
        start += entry.count
        if entry.alone:
            start = bucket = close(start)
    if spans:
        bucket = close(start)
    return _Buffer(bucket, tuple(owned))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
