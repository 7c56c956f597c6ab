"""Activation memory of a training step: what autograd saves of a micro-batch until backward, from the spec. No torch.

Counted are the saved tensors (``saved_tensors``), module by module, in values per token. The peak is either at the end
of the forward pass, when the logits of some tokens exist, or where several residual streams are joined, or in the
backward pass of a layer, which frees what the layer saved as it goes, and holds gradients meanwhile
(``layer_gradients``). Where these are not derived they are taken for one more of what was saved, and if a weight is
quantized for what that takes, where it is more.

For a tensor-parallel model pass one rank's spec; the residual stream is replicated on each rank, unless sequence
parallelism shards its tokens over ``sequence`` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from miles.models.accounting.layer_gradients import LayerGradients
from miles.models.accounting.linear_inputs import LayerAdapters, saved_input_bytes
from miles.models.accounting.params import StagePart
from miles.models.accounting.quantize_workspace import quantize_workspace_bytes
from miles.models.accounting.saved_tensors import ContextScan, SavedBytes
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.lora.targets import LoraSpec
from miles.models.quantization import quantizes_layer
from miles.models.residual_spec import GatedResidualSpec, HyperConnectionSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    RelativeAttentionSpec,
    RopeSpec,
    ShortConvSpec,
)
from miles.precision.formats import QuantizationSpec

RecomputeMode = Literal["none", "selective", "full"]

# Logits of a chunk, by whether it is on an accelerator; the training kernels take twice as many there.
_CHUNK_LOGITS = {False: 1 << 24, True: 1 << 27}
MAX_CACHED_POSITIONS = 1 << 18
"""Positions up to which an accelerator keeps the sines and cosines of all of them."""
MAX_KEPT_LOGIT_GRADS = 5 << 29
"""Gradients of logits that a step on an accelerator keeps in half precision; of more, logits are computed twice."""


def layer_bytes(
    spec: DecoderSpec,
    index: int,
    *,
    size: int,
    fused: bool,
    sequence: int = 1,
    lora: LoraSpec | None = None,
    scan: ContextScan = ContextScan(),  # noqa: B008 (immutable)
) -> float:
    """Compute what layer ``index`` saves per token; ``size`` is the bytes of a value. Under ``lora`` it is frozen."""
    setting = _list_settings(spec, lora)[index]
    count = _build_count(setting, spec, size, fused, sequence, _Batch(0, 0))
    return _layer_bytes(setting, spec, count, scan)


class _Batch(NamedTuple):
    """Tokens of a rank's micro-batch, and of its longest sequence."""

    tokens: int
    longest: int


class _LayerSetting(NamedTuple):
    """What the bytes of a layer depend on, beside the model."""

    layer: LayerSpec
    quantization: QuantizationSpec | None
    adapters: LayerAdapters | None


def _list_settings(spec: DecoderSpec, lora: LoraSpec | None) -> list[_LayerSetting]:
    quantization, settings = spec.quantization, list[_LayerSetting]()
    for index, layer in enumerate(spec.layers):
        is_quantized = quantization is not None and quantizes_layer(quantization, index, spec.num_layers)
        is_known = lora is not None and not isinstance(spec, HfAdapterSpec)  # of those, all inputs are counted
        copies = layer.ffn.experts_per_token if isinstance(layer.ffn, MoeSpec) else 0
        adapters = LayerAdapters.from_lora(lora, index, copies) if is_known and lora is not None else None
        settings.append(_LayerSetting(layer, quantization if is_quantized else None, adapters))
    return settings


def _build_count(
    setting: _LayerSetting, spec: DecoderSpec, size: int, fused: bool, sequence: int, batch: _Batch
) -> SavedBytes:
    return SavedBytes(
        size=size,
        fused=fused,
        offset=spec.norm_offset != 0,
        sequence=sequence,
        frozen=setting.adapters is not None,
        longest=batch.longest,
        tokens=batch.tokens,
    )


def _layer_bytes(setting: _LayerSetting, spec: DecoderSpec, count: SavedBytes, scan: ContextScan) -> float:
    layer, quantization, adapters = setting
    size = count.size
    total = count.layer(layer, spec.hidden_size)
    if layer.mixer is not None and scan.ranks > 1:
        total += count.context_scan(layer.mixer, scan)
    total += saved_input_bytes(layer, spec.hidden_size, size=size, quantization=quantization, adapters=adapters)
    total += 0 if adapters is None else size * adapters.extra
    is_packed = quantization is not None and quantization.packed
    if adapters is not None and (is_packed or adapters.unmerged):
        # Beside its base an adapter saves the product of its input with its first factor.
        total += size * adapters.count_products(layer)
    return total


def stream_bytes(spec: DecoderSpec, size: int) -> float:
    """Compute what the decoder saves per token to normalize the embedding, to split it into residual streams and to
    join them.
    """
    return _split_bytes(spec, size) + _join_bytes(spec, size)


def _split_bytes(spec: DecoderSpec, size: int) -> float:
    if spec.embedding_norm:
        return 2.0 * size * spec.hidden_size
    if spec.altup is None:
        return 0.0
    return float(size * spec.hidden_size * (2 * (spec.altup.streams - 1) + 1))


def _rope_table_bytes(spec: DecoderSpec, size: int) -> int:
    """Compute the sines and cosines of all positions, which are kept for every rotation up to some context length."""
    if spec.max_positions > MAX_CACHED_POSITIONS:
        return 0
    channels: dict[tuple[RopeSpec, int], int] = {}
    for layer in spec.layers:
        match layer.mixer:
            case AttentionSpec(rope=rope, head_dim=dim) | CompressedAttentionSpec(rope=rope, head_dim=dim):
                pass
            case MlaSpec(rope=rope, rope_dim=dim):
                pass
            case _:
                continue
        if rope is not None:
            channels[rope, rope.dim or dim] = rope.dim or dim
    return sum(channels.values()) * 2 * spec.max_positions * size


def _join_bytes(spec: DecoderSpec, size: int) -> float:
    """Of AltUp the streams and what is made of each but the first; of hyper-connections the streams, and for a learned
    sum of them a copy and its norm in float32.
    """
    if spec.altup is not None:
        return float(size * spec.hidden_size * (2 * (spec.altup.streams - 1) + spec.altup.streams))
    hyper = spec.layers[-1].hyper
    streams = spec.streams * spec.hidden_size
    if isinstance(hyper, HyperConnectionSpec) and hyper.learned_join:
        return streams * (size + (8.0 if size < 4 else 4.0))
    return float(size * streams) if isinstance(hyper, GatedResidualSpec) else 0.0


def _join_gradient_bytes(spec: DecoderSpec, size: int) -> float:
    """Compute the gradients per token where residual streams are joined: in float32 a product for each stream and one
    for its weight, or the gated streams computed again; those of all streams, twice for AltUp.
    """
    hyper, width = spec.layers[-1].hyper, spec.hidden_size
    if spec.altup is not None:
        return 2.0 * size * spec.altup.streams * width
    streams = spec.streams * width
    if isinstance(hyper, GatedResidualSpec):
        return 5 * 4.0 * streams + size * width
    if isinstance(hyper, HyperConnectionSpec):
        return 8.0 * streams + 4.0 * width if hyper.learned_join else float(size * streams)
    return 0.0


class _Outputs(NamedTuple):
    """Values per token in the outputs of attention and the router, of linear layers, and of routed experts; and bytes
    of softmax statistics.
    """

    attended: float = 0.0
    linear: float = 0.0
    routed: float = 0.0
    statistics: float = 0.0


def _mixer_outputs(mixer: Mixer | None, width: int) -> _Outputs:
    match mixer:
        case AttentionSpec():
            queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
            keys = 0 if mixer.kv_source is not None else keys
            linear = queries * (2 if mixer.gated else 1) + keys * (1 if mixer.value_from_key else 2) + width
            linear += mixer.num_heads if mixer.head_gate else 0
            return _Outputs(queries, linear, 0.0, 4.0 * mixer.num_heads)
        case RelativeAttentionSpec():
            queries = mixer.num_heads * mixer.head_dim
            linear = queries + mixer.kv_channels + mixer.num_heads * mixer.rank + width
            return _Outputs(queries, linear, 0.0, 4.0 * mixer.num_heads)
        case MlaSpec():
            linear = (mixer.query_rank or 0) + mixer.num_heads * mixer.head_dim + mixer.kv_rank + mixer.rope_dim
            linear += mixer.num_heads * (mixer.nope_dim + mixer.value_dim) + width
            return _Outputs(mixer.num_heads * mixer.value_dim, linear, 0.0, 4.0 * mixer.num_heads)
        case CompressedAttentionSpec():
            queries, outputs = mixer.num_heads * mixer.head_dim, mixer.output_groups * mixer.output_rank
            states = 0 if mixer.compressor is None else mixer.compressor.state_dim(mixer.head_dim)
            linear = mixer.query_rank + queries + mixer.head_dim + states + width
            return _Outputs(queries, linear + outputs, 0.0, 4.0 * mixer.num_heads)
        case GatedDeltaNetSpec():
            projected = mixer.key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + 1)
            return _Outputs(linear=2 * projected + width)
        case KimiDeltaSpec():
            inner = mixer.num_heads * mixer.head_dim
            return _Outputs(linear=5 * inner + 2 * mixer.head_dim + mixer.num_heads + width)
        case MambaSpec():
            projected = mixer.num_heads * mixer.head_dim + mixer.groups * mixer.state_dim
            return _Outputs(linear=2 * projected + mixer.num_heads + width)
        case ShortConvSpec():
            return _Outputs(linear=3 * mixer.channels + width)
        case None:
            return _Outputs()


def _ffn_outputs(ffn: MlpSpec | MoeSpec | None, width: int) -> _Outputs:
    if ffn is None:
        return _Outputs()
    inner = ffn.size * (2 if ffn.gated else 1)
    if isinstance(ffn, MlpSpec):
        return _Outputs(linear=inner + width)
    linear = ffn.latent + width if ffn.latent else 0
    linear += ffn.weighed_shared * (inner + width)
    if ffn.shared is not None:
        linear += ffn.shared.size * (2 if ffn.shared.gated else 1) + width + (1 if ffn.shared_gate else 0)
    return _Outputs(ffn.num_experts, linear, ffn.experts_per_token * (inner + (ffn.latent or width)))


def _matmul_output_bytes(setting: _LayerSetting, width: int, size: int, fused: bool) -> float:
    """Compute the outputs of attention and matmuls per token, plus the softmax statistics of attention.

    Inputs that are quantized but dequantized again give an output in float32. The FP8 kernel of experts is no matmul of
    torch's, so its output is not saved but recomputed.
    """
    pairs = zip(_mixer_outputs(setting.layer.mixer, width), _ffn_outputs(setting.layer.ffn, width), strict=True)
    outputs = _Outputs(*map(sum, pairs))
    altup = setting.layer.altup
    if altup is not None:  # the mixture of streams, its coefficients, and the learned residual
        streams = altup.streams
        mixed = streams * width + streams**2 + 3 * streams + setting.layer.laurel_rank + width
        outputs = outputs._replace(linear=outputs.linear + mixed)
    linear = routed = size
    quantization = setting.quantization
    if quantization is not None and quantization.format.quantizes_activations:
        has_kernel = fused and quantization.format.scale == "float32"
        linear = size if has_kernel or quantization.experts_only else 4
        routed = 0 if has_kernel else 4
    return outputs.attended * size + outputs.linear * linear + outputs.routed * routed + outputs.statistics


def _head_bytes(
    spec: DecoderSpec, tokens: int, size: int, fused: bool, *, is_trained: bool, keeps_grads: bool
) -> float:
    """Compute what log-probs take at their widest: logits of a chunk in float32, those of the chunk before or their
    gradients, and gradients of the output layer, or of all logits where these are kept.
    """
    has_kernel = fused and size < 4
    rows = min(tokens, max(1, _CHUNK_LOGITS[fused] * (2 if has_kernel else 1) // spec.vocab_size))
    chunk = rows * spec.vocab_size * 4.0
    if has_kernel and keeps_grads:
        # In the backward pass the gradients of the weight and of the hidden states, which are scaled in float32.
        gradients = spec.vocab_size * spec.hidden_size * size if is_trained else 0
        gradients += tokens * spec.hidden_size * 2 * size
        return tokens * spec.vocab_size * size + max((2 if tokens > rows else 1) * chunk, gradients)
    # The float32 gradient of the output layer, which an adapter of it does without.
    head_gradient = 4.0 * spec.vocab_size * spec.hidden_size if is_trained else 0.0
    return chunk * (2 if has_kernel else 3) + head_gradient


class StepMoments(NamedTuple):
    """Bytes of activations at those moments of a step that may be its widest: at the head, and in each layer's backward
    pass, with what that holds beyond the saved tensors and without (``saved``). ``kept`` is there between forward and
    backward.
    """

    head: int
    layers: tuple[int, ...]
    saved: tuple[int, ...]
    kept: int

    @property
    def peak(self) -> int:
        """The most of them."""
        return max(self.head, *self.layers)


def activation_bytes(
    spec: DecoderSpec,
    tokens: int,
    *,
    size: int,
    fused: bool,
    checkpointing: bool = False,
    recompute: RecomputeMode = "none",
    first: int | None = None,
    sequence: int = 1,
    lora: LoraSpec | None = None,
    experts: int = 1,
    scan: ContextScan = ContextScan(),  # noqa: B008 (immutable)
    keeps_logit_grads: bool = False,
    longest: int | None = None,
    gathered: bool = False,
) -> int:
    """Compute the peak of a step besides weights, gradients and optimizer, with ``tokens`` in a rank's micro-batch.

    ``checkpointing`` is ``full`` recomputation. The rest is as in ``list_step_moments``.
    """
    return list_step_moments(
        spec,
        tokens,
        size=size,
        fused=fused,
        recompute="full" if checkpointing else recompute,
        first=first,
        sequence=sequence,
        lora=lora,
        experts=experts,
        scan=scan,
        keeps_logit_grads=keeps_logit_grads,
        longest=longest,
        gathered=gathered,
    ).peak


def list_step_moments(
    spec: DecoderSpec,
    tokens: int,
    *,
    size: int,
    fused: bool,
    recompute: RecomputeMode = "none",
    first: int | None = None,
    sequence: int = 1,
    lora: LoraSpec | None = None,
    experts: int = 1,
    scan: ContextScan = ContextScan(),  # noqa: B008 (immutable)
    keeps_logit_grads: bool = False,
    longest: int | None = None,
    gathered: bool = False,
    stage: StagePart | None = None,
) -> StepMoments:
    """Compute what a step has of activations at each moment, with ``tokens`` in a rank's micro-batch.

    Under ``full`` recomputation a layer saves only its input, and one layer at a time is recomputed; ``selective`` also
    saves attention and matmul outputs. If only the ``first`` layers are recomputed, the others save everything.
    Sequence parallelism shards the residual stream over ``sequence`` ranks. With ``lora`` only its adapters are
    trained. ``experts`` ranks share the experts of a layer. ``scan`` is what context ranks scan of recurrent layers.
    ``keeps_logit_grads``: logits are computed once (``train.logprobs``). No sequence has more than ``longest`` tokens.
    ``gathered``: parameters are sharded, and gradients of weights are counted with what is gathered of them. By default
    one ``stage`` has all layers.
    """
    layers, is_first, is_last = stage or StagePart(range(spec.num_layers), first=True, last=True)
    settings = _list_settings(spec, lora)[layers.start : layers.stop]
    recomputed = 0 if recompute == "none" else len(settings) if first is None else min(first, len(settings))
    workspace = quantize_workspace_bytes(spec, size=size, fused=fused, experts=experts)
    streams = spec.streams if spec.altup is None else spec.altup.streams
    entered = streams * spec.hidden_size * size / sequence
    batch = _Batch(tokens, tokens if longest is None else min(longest, tokens))
    costs: dict[_LayerSetting, tuple[float, float, float]] = {}
    for setting in set(settings):
        count = _build_count(setting, spec, size, fused, sequence, batch)
        saved = _layer_bytes(setting, spec, count, scan)
        kept = 0.0 if recompute != "selective" else _matmul_output_bytes(setting, spec.hidden_size, size, fused)
        gradients = LayerGradients(count=count, width=spec.hidden_size, adapters=setting.adapters, gathered=gathered)
        is_derived = setting.quantization is None and experts == 1 and scan.ranks == 1
        wide = gradients.layer(setting.layer, saved) if is_derived else saved + 2 * count.numbers(spec.hidden_size)
        costs[setting] = saved, entered + kept, wide
    # What does not depend on the layer: split streams; the head's gradient waits for the embedding's if they are tied.
    fixed = tokens * _split_bytes(spec, size) if is_first else 0.0
    fixed += _factor_bytes(spec, size, lora, len(settings), recomputed)
    tables = _rope_table_bytes(spec, size) if fused else 0
    is_tied = spec.tie_embeddings and is_first and is_last and lora is None
    tied = spec.vocab_rows * spec.hidden_size * size if is_tied else 0
    before = fixed + tables + tied
    rows = [costs[setting] for setting in settings]
    wides, held, before = _stack_layers(rows, before, tokens, entered, recomputed, workspace)
    between = before - tied + (tokens * _join_bytes(spec, size) if is_last else 0.0)
    head = between
    if is_last:
        logits = _head_bytes(spec, tokens, size, fused, is_trained=lora is None, keeps_grads=keeps_logit_grads)
        head = _behind_layers_bytes(spec, tokens, size, between, logits, tied)
        # At the embedding, a head that is tied to it has a gradient of its own.
        head = max(head, tables + 2 * tied + tokens * spec.hidden_size * size)
    return StepMoments(round(head), tuple(wides), tuple(held), round(between - tables))


def _stack_layers(
    rows: Sequence[tuple[float, float, float]],
    before: float,
    tokens: int,
    entered: float,
    recomputed: int,
    workspace: int,
) -> tuple[list[int], list[int], float]:
    """Add up what layers save, keep and hold in their backward pass, of which the first are ``recomputed``: what there
    is in the backward pass of each, without what that holds, and behind the last.
    """
    wides, held = list[int](), list[int]()
    for index, (saved, kept, wide) in enumerate(rows):
        is_again = index < recomputed
        # Its input is both kept and, as what its first norm read, a part of what it has saved.
        whole = before + tokens * (saved + (kept - entered if is_again else 0.0))
        wides.append(round(whole + max(tokens * wide, workspace)))
        held.append(round(whole))
        before += tokens * (kept if is_again else saved)
    return wides, held, before


def _behind_layers_bytes(spec: DecoderSpec, tokens: int, size: int, between: float, logits: float, tied: int) -> float:
    """Compute what there is behind the layers: ``between`` forward and backward, and the hidden states before and after
    their norm with the ``logits``, or the gradients where streams are joined.
    """
    joining = tied + tokens * _join_gradient_bytes(spec, size)
    return between + max(tokens * 2 * spec.hidden_size * size + logits, joining)


def _factor_bytes(spec: DecoderSpec, size: int, lora: LoraSpec | None, layers: int, recomputed: int) -> int:
    """Compute the LoRA factors of some layers, saved in the model's dtype beside a base; if recomputed, of one."""
    is_packed = spec.quantization is not None and spec.quantization.packed
    if lora is None or not (is_packed or lora.unmerged):
        return 0
    return lora.num_parameters * size * (1 if recomputed == layers else layers) // spec.num_layers
