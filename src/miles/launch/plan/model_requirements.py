"""Requirements of a model from its config alone: ``miles plan MODEL``, before anything is downloaded."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Any

from miles.algo.config import CRITIC_ESTIMATORS, OFFLINE_LOSSES, uses_distillation
from miles.cluster.hub_client import get_model_name
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.core.hub_names import parse_hub_name
from miles.launch.config import Config
from miles.launch.hub.resolve import resolve_model
from miles.launch.plan.layout_memory import estimate_rank_lora_memory
from miles.launch.plan.lora import build_lora, is_unmerged, packs_base, shares_critic, shares_reference
from miles.launch.plan.memory import estimate_adapter_critic_bytes, estimate_critic_bytes, format_bytes
from miles.launch.plan.plan import parse_teacher_folders
from miles.models.accounting.activations import activation_bytes
from miles.models.accounting.known_models import find_known_config, find_source, load_known_models
from miles.models.accounting.params import (
    BYTES,
    active_parameter_count,
    forward_flops_per_token,
    gradient_bytes,
    kv_bytes_per_token,
    optimizer_bytes,
    packed_weight_bytes,
    parameter_count,
    state_bytes_per_sequence,
    vision_parameter_count,
    weight_bytes,
)
from miles.models.checkpoint.safetensors_io import config_dtype, read_config, read_json
from miles.models.families import spec_from_config
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.resolve import resolve_spec
from miles.models.spec import (
    AttentionSpec,
    BlockIndexerSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MoeSpec,
    RecurrentMixer,
    RelativeAttentionSpec,
    ShortConvSpec,
)

# Common GPU memory sizes in GB; a tenth of each is left for the driver and fragmentation.
GPU_SIZES = (24, 80, 141, 192)
_USABLE = 0.9e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequirements:
    """Bytes and FLOPs. ``context`` is the length of a sequence; ``tokens`` the size of a micro-batch.

    The numbers of GPUs are by memory size in GB; 0 where the activations alone do not fit one GPU. ``source`` says
    where the sizes of a published model come from; it is empty for a config that was read.
    """

    name: str
    source: str
    family: str
    dtype: str
    layers: str
    parameters: int
    active_parameters: int
    weights: int
    weights_form: str
    gradients: int
    optimizer: int
    reference: int
    critic: int
    teachers: int
    adapters: int
    activations: int
    activations_checkpointed: int
    checkpointing: bool
    tokens: int
    context: int
    kv_per_token: int
    state_per_sequence: int
    forward_flops: float
    rollout_precision: str
    rollout_weights: int
    gpus_to_sample: dict[int, int]
    gpus_to_train: dict[int, int]
    gpus_to_train_checkpointed: dict[int, int]

    @property
    def training(self) -> int:
        """Total memory of the trainer."""
        held = self.activations_checkpointed if self.checkpointing else self.activations
        others = self.reference + self.critic + self.teachers + self.adapters
        return self.weights + self.gradients + self.optimizer + others + held


def find_model_config(model: str) -> tuple[str, Mapping[str, Any]]:
    """A model's name and config: a checkpoint's folder, a config.json, or the name of a published model."""
    path = Path(model)
    if path.is_dir():
        return path.resolve().name, read_config(path)
    if path.is_file():
        return path.resolve().parent.name, read_json(path)
    if (config := find_known_config(model)) is not None:
        return model, config
    if parse_hub_name("model", model) is not None:
        return get_model_name(model), read_config(resolve_model(model, weights=False))
    near = get_close_matches(model.rpartition("/")[2], load_known_models(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(load_known_models())}"
    raise UsageError(f"{model} is not a recipe, a folder with a config.json or a known published model; {hint}.")


def estimate_requirements(model: str, run: Config) -> ModelRequirements:
    """The requirements of a model with a run's options; the dtype is the checkpoint's, or bfloat16 if it has none."""
    name, config = find_model_config(model)
    is_read = config is not find_known_config(model)
    spec = _resolve_model_spec(model, run)
    named = config_dtype(config) if run.models.dtype == "auto" else run.models.dtype
    dtype = named if named in BYTES else "bfloat16"
    context = min(spec.max_positions, run.rollout.rollout_max_context_len or spec.max_positions)
    tokens = run.train.max_tokens_per_gpu
    options: dict[str, Any] = {"size": BYTES[dtype], "fused": True, "longest": context, "gathered": True}
    activations = [activation_bytes(spec, tokens, checkpointing=each, **options) for each in (False, True)]
    weights = weight_bytes(spec, dtype)
    rollout_weights = packed_weight_bytes(replace(spec, quantization=run.models.rollout_quantization(1)), dtype)
    others = _estimate_side_models(spec, run, dtype)
    gradients, optimizer = gradient_bytes(spec, dtype), optimizer_bytes(spec, dtype)
    lora = build_lora(run.lora, spec)
    if packs_base(run):
        spec = replace(spec, quantization=run.models.rollout_quantization(1))
        weights = packed_weight_bytes(spec, dtype)
    if lora is not None:
        memory = estimate_rank_lora_memory(spec, ParallelDims(), dtype, lora)
        gradients, optimizer = memory.gradients, memory.optimizer
        others["adapters"] = memory.base + memory.adapters
    fixed = weights + gradients + optimizer + sum(others.values())
    kept = activations[run.train.gradient_checkpointing]
    kv_per_token = kv_bytes_per_token(spec, dtype, run.models.numerics)
    sequence = context * kv_per_token + state_bytes_per_sequence(spec, dtype)
    return ModelRequirements(
        name=name,
        source="" if is_read else find_source(model) or "",
        family=spec.family,
        dtype=dtype,
        layers=_describe_layers(spec),
        parameters=parameter_count(spec),
        active_parameters=active_parameter_count(spec),
        weights=weights,
        weights_form=_describe_weights(run, dtype),
        gradients=gradients,
        optimizer=optimizer,
        reference=others["reference"],
        critic=others["critic"],
        teachers=others["teachers"],
        adapters=others["adapters"],
        activations=activations[0],
        activations_checkpointed=activations[1],
        checkpointing=run.train.gradient_checkpointing,
        tokens=tokens,
        context=context,
        kv_per_token=kv_per_token,
        state_per_sequence=state_bytes_per_sequence(spec, dtype),
        forward_flops=forward_flops_per_token(spec, context / 2),
        rollout_precision=run.models.rollout_format or dtype,
        rollout_weights=rollout_weights,
        gpus_to_sample={size: ceil((rollout_weights + sequence) / (size * _USABLE)) for size in GPU_SIZES},
        gpus_to_train={size: _count_gpus(fixed, kept, size) for size in GPU_SIZES},
        gpus_to_train_checkpointed={size: _count_gpus(fixed, activations[1], size) for size in GPU_SIZES},
    )


def _resolve_model_spec(model: str, run: Config) -> DecoderSpec:
    return (
        resolve_spec(model, run.models.model_impl)
        if Path(model).is_dir()
        else spec_from_config(find_model_config(model)[1])
    )


def _estimate_side_models(spec: DecoderSpec, run: Config, dtype: str) -> dict[str, int]:
    """Memory of the other models in the trainer; teachers may be published models too."""
    a, t = run.algo, run.train
    needs_reference = a.use_kl_loss or a.kl_coef > 0 or a.loss_type == "dpo_loss"
    has_critic = (
        a.advantage_estimator in CRITIC_ESTIMATORS and a.loss_type not in OFFLINE_LOSSES and t.critic_device == "auto"
    )
    critic = 0
    if has_critic and shares_critic(run) and (lora := build_lora(run.lora, spec)) is not None:
        adapters, optimizer = estimate_adapter_critic_bytes(spec, lora, ParallelDims())
        critic = 2 * adapters + optimizer
    elif has_critic:
        own = spec if t.critic_load is None else _resolve_model_spec(t.critic_load, run)
        critic = sum(estimate_critic_bytes(own, dtype))
    folders = parse_teacher_folders(run).values() if uses_distillation(a) else ()
    return {
        "reference": weight_bytes(spec, dtype) if needs_reference and not shares_reference(run) else 0,
        "critic": critic,
        "teachers": sum(weight_bytes(_resolve_model_spec(str(folder), run), dtype) for folder in folders),
        "adapters": 0,
    }


def _count_gpus(shared: int, each: int, gpu_size: int) -> int:
    """GPUs that share ``shared`` bytes while each holds ``each``; 0 where that does not fit."""
    free = gpu_size * _USABLE - each
    return ceil(shared / free) if free > 0 else 0


_RECURRENT: Mapping[type[RecurrentMixer], str] = {
    GatedDeltaNetSpec: "gated DeltaNet",
    KimiDeltaSpec: "Kimi Delta Attention",
    MambaSpec: "Mamba-2",
    ShortConvSpec: "short convolution",
}


def _describe_layer(layer: LayerSpec) -> str:
    if isinstance(layer.ffn, MoeSpec):
        ffn = f"{layer.ffn.experts_per_token} of {layer.ffn.num_experts} experts"
    else:
        ffn = "" if layer.ffn is None else "MLP"
    ngram = "" if layer.ngram is None else "n-gram embeddings"
    return " + ".join(filter(None, (ngram, _describe_mixer(layer.mixer), ffn)))


def _describe_mixer(mixer: Mixer | None) -> str:
    match mixer:
        case None:
            return ""
        case AttentionSpec():
            return _describe_attention(mixer)
        case MlaSpec():
            return "MLA" if mixer.indexer is None else "sparse MLA"
        case RelativeAttentionSpec():
            return "relative attention" if mixer.window is None else f"relative attention over {mixer.window:,}"
        case CompressedAttentionSpec():
            return f"attention over {mixer.window:,}" if mixer.compressor is None else "compressed attention"
        case recurrent:
            return _RECURRENT[type(recurrent)]


def _describe_attention(mixer: AttentionSpec) -> str:
    if isinstance(mixer.indexer, BlockIndexerSpec):
        return "block-sparse attention"
    if mixer.indexer is not None:
        return "sparse attention"
    limit = mixer.window or mixer.chunk
    return "attention" if limit is None else f"attention over {limit:,}"


def _describe_layers(spec: DecoderSpec) -> str:
    """The layers by kind, most frequent first, and the vision tower."""
    text = ", ".join(f"{count} of {kind}" for kind, count in Counter(map(_describe_layer, spec.layers)).most_common())
    if spec.vision is None:
        return text
    if isinstance(spec, HfAdapterSpec):
        return f"{text}; a vision tower that transformers runs"
    size = vision_parameter_count(spec) / 1e6
    return f"{text}; a vision tower of {spec.vision.tower.num_layers} blocks with {size:,.1f}M parameters"


def as_json(requirements: ModelRequirements) -> str:
    """As JSON."""
    return json.dumps(asdict(requirements) | {"training": requirements.training}, indent=2)


def as_text(requirements: ModelRequirements) -> str:
    """As text."""
    n = requirements
    mode = "with --gradient-checkpointing" if n.checkpointing else "without --gradient-checkpointing"
    other = n.activations if n.checkpointing else n.activations_checkpointed
    held = n.activations_checkpointed if n.checkpointing else n.activations
    masters = "" if n.dtype == "float32" else " and float32 masters"
    rows = [
        ("weights", n.weights, n.weights_form),
        ("gradients", n.gradients, "float32"),
        (
            "optimizer",
            n.optimizer,
            f"Adam: two moments{masters}" if not n.adapters else "Adam: two moments of adapters",
        ),
        *([("adapters", n.adapters, _describe_adapters(n))] if n.adapters else []),
        *([("reference", n.reference, n.dtype)] if n.reference else []),
        *([("critic", n.critic, "weights, gradients and optimizer")] if n.critic else []),
        *([("teachers", n.teachers, n.dtype)] if n.teachers else []),
        (
            "activations",
            held,
            f"{n.tokens:,} tokens at once {mode} ({format_bytes(other)} {'without' if n.checkpointing else 'with'})",
        ),
        ("training", n.training, "in all, before sharding"),
        (
            "kv cache",
            n.kv_per_token,
            f"per token; {format_bytes(n.kv_per_token * n.context)} for a context of {n.context:,}",
        ),
        *(
            [("engine", n.rollout_weights, f"weights in {n.rollout_precision}")]
            if n.rollout_weights != n.weights
            else []
        ),
        *([("state", n.state_per_sequence, "per sequence of any length")] if n.state_per_sequence else []),
    ]
    active = f", {n.active_parameters / 1e9:,.2f}B active per token" if n.active_parameters < n.parameters else ""
    work = f"{n.forward_flops / 1e9:,.1f} GFLOP per token to sample, {3 * n.forward_flops / 1e9:,.1f} to train"
    lines = [
        f"model        {n.name} ({n.family}): {n.parameters / 1e9:,.2f}B parameters{active}",
        *([f"sizes        {n.source}"] if n.source else []),
        f"layers       {n.layers}",
        *(f"{name.ljust(12)} {format_bytes(count).rjust(10)}  {note}" for name, count, note in rows),
        f"work         {work}, in the middle of the context",
        f"to sample    {_format_gpu_counts(n.gpus_to_sample)}",
        *(f"{label.ljust(12)} {text}" for label, text in _format_training_gpus(n)),
    ]
    return "\n".join(lines)


def _describe_weights(run: Config, dtype: str) -> str:
    form = f"packed in {run.models.train_precision}" if packs_base(run) else dtype
    return f"{form}, frozen" if is_unmerged(run) else dtype


def _describe_adapters(requirements: ModelRequirements) -> str:
    is_wide = requirements.weights_form == requirements.dtype
    return "adapters, and the base weights of adapted modules" if is_wide else "float32"


def _format_training_gpus(requirements: ModelRequirements) -> list[tuple[str, str]]:
    """Lines for the GPUs that training needs, as asked and, if that is fewer, with gradient checkpointing."""
    plain, checkpointed = requirements.gpus_to_train, requirements.gpus_to_train_checkpointed
    if not any(checkpointed.values()):
        return [("to train", "no GPU holds the activations; lower --max-tokens-per-gpu")]
    lines = [("to train", _format_gpu_counts(plain))] if any(plain.values()) else []
    if plain != checkpointed:
        counts = f"with --gradient-checkpointing {_format_gpu_counts(checkpointed)}"
        lines.append(("" if lines else "to train", counts))
    return lines


def _format_gpu_counts(gpus: Mapping[int, int]) -> str:
    return "at least " + ", or ".join(f"{count:,} of {size} GB" for size, count in gpus.items() if count)
