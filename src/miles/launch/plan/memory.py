"""Memory plan: what a run will hold on its GPU, estimated from the model's spec."""

from dataclasses import dataclass, replace
from math import prod

from miles.algo.config import PREFERENCE_LOSSES
from miles.backends.megatron.rank_memory import MegatronMemoryFlags
from miles.cluster.parallel_dims import ParallelDims
from miles.launch.config import Config
from miles.launch.plan.drafts import read_engine_draft, read_trained_draft
from miles.launch.plan.hardware import get_free_memory
from miles.launch.plan.layout_memory import (
    StepPeak,
    estimate_moment_bytes,
    estimate_rank_activations,
    estimate_rank_critic_memory,
    estimate_rank_frozen_bytes,
    estimate_rank_lora_memory,
    estimate_rank_memory,
    estimate_single_peak,
    get_counted_recompute,
    get_frozen_vision,
    get_megatron_flags,
    get_recompute_mode,
    packs_reference,
)
from miles.launch.plan.lora import (
    build_lora,
    get_rollout_quantization,
    is_unmerged,
    names_versions,
    packs_base,
    shares_critic,
    shares_reference,
)
from miles.launch.plan.pipeline_memory import (
    StepCounts,
    bound_step_counts,
    count_in_flight,
    estimate_stage_activations,
)
from miles.launch.plan.plan import Plan
from miles.launch.plan.running_requests import count_running_requests
from miles.launch.plan.topology import is_distributed
from miles.launch.rules.paths import read_spec_or_none
from miles.models.accounting.cuda_graphs import (
    count_prefill_graph_tokens,
    graph_pool_bytes,
    has_decode_graphs,
    has_prefill_graphs,
)
from miles.models.accounting.draft import draft_activation_bytes, draft_optimizer_bytes, draft_weight_bytes
from miles.models.accounting.image_features import vision_bytes
from miles.models.accounting.params import (
    BYTES,
    kv_bytes_per_token,
    packed_weight_bytes,
    parameter_count,
    state_bytes_per_sequence,
    weight_bytes,
)
from miles.models.accounting.vision import vision_activation_bytes
from miles.models.draft.spec import DraftSpec
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.lora.targets import LoraSpec
from miles.models.parallel.tp_sharding import shard_spec
from miles.models.spec import DecoderSpec
from miles.rollout.config import resolve_context_limit
from miles.rollout.eval_options import list_set_options


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """One user of the GPU's memory."""

    name: str
    bytes: int
    note: str


def estimate_memory(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[MemoryShare, ...]:
    """The peak memory of a run on the fullest GPU, as far as the spec determines it."""
    dtype = plan.dtype
    weights, shared = weight_bytes(spec, dtype), plan.transport == "shared"
    stages = (_estimate_trained(config, plan, spec, stage) for stage in range(plan.layout.pipeline))
    trained = max(stages, key=lambda shares: sum(share.bytes for share in shares))
    if config.observe.debug_rollout_only:
        trained = (MemoryShare(name="weights", bytes=weights, note=f"{dtype}: nothing is trained"),)
    if not plan.samples:
        return trained
    world = config.cluster.rollout_num_gpus_per_engine
    if config.models.rollout_dtype != "auto":
        dtype = config.models.rollout_dtype
    spec = replace(spec, quantization=config.models.rollout_quantization(world))
    form = "" if spec.quantization is None else f" in {spec.quantization.format.name}"
    weights = packed_weight_bytes(spec, dtype)
    size, note = (0, "shares the trainer's") if shared else (weights, f"its own copy{form}")
    if is_unmerged(config) and plan.transport == "copy" and dtype == plan.dtype:
        size, note = 0, "shares the trainer's base"
    adapted = plan.transport == "served" and world == 1 and spec.quantization is None and not is_unmerged(config)
    if adapted and (lora := build_lora(config.lora, spec)) is not None:
        size += lora.num_base_parameters * BYTES[dtype]
        note = "its own copy, and the base weights of adapted modules"
    if is_unmerged(config):
        size += _count_factors(config, spec) * BYTES[dtype]
        note += ", and the adapters"
    draft = read_engine_draft(config, spec)
    if world > 1:
        spec = shard_spec(spec, world)
        size, note = packed_weight_bytes(spec, dtype), f"its own copy of one of {world} shards{form}"
    tokens, why = estimate_kv_tokens(config, plan, spec, draft)
    kv_bytes = tokens * kv_bytes_per_token(spec, dtype, config.models.numerics)
    return (
        *trained,
        MemoryShare(name="engine", bytes=size, note=note),
        MemoryShare(name="kv cache", bytes=kv_bytes, note=f"{tokens:,} tokens: {why}"),
        *_estimate_states(config, plan, spec),
        *_estimate_images(config, spec, dtype),
        *_estimate_graphs(config, plan, spec, dtype),
        *_estimate_engine_draft(config, plan, draft, tokens, dtype),
    )


def _estimate_trained(config: Config, plan: Plan, spec: DecoderSpec, stage: int) -> tuple[MemoryShare, ...]:
    """What a rank of a pipeline stage holds to train; all ranks are alike without a pipeline."""
    reference = 0 if plan.reference is None else _estimate_reference(config, plan, spec, stage)
    note = str(plan.reference) if plan.reference else "not needed"
    if plan.reference is not None and shares_reference(config):
        note = "the base, with the adapters off"
    return (
        *_estimate_policy(config, plan, spec, stage),
        MemoryShare(name="reference", bytes=reference, note=note),
        *_estimate_critic(config, plan, spec, stage),
        *_estimate_teachers(config, plan, stage),
        _estimate_activations(config, plan, spec, stage),
        *_estimate_vision(config, plan, spec, stage),
        *_estimate_draft_training(config, plan, spec, stage),
    )


def _estimate_reference(config: Config, plan: Plan, spec: DecoderSpec, stage: int) -> int:
    if shares_reference(config):
        updated = config.train.ref_update_interval is not None
        return 4 * _count_factors(config, spec) * (2 if updated else 1)  # factors that are set aside meanwhile
    if packs_reference(config):
        shared = get_rollout_quantization(config) if packs_base(config) else None
        spec = replace(spec, quantization=shared or config.models.train_quantization(packed=True))
    return _estimate_frozen(config, plan, spec, stage)


def _estimate_frozen(config: Config, plan: Plan, spec: DecoderSpec, stage: int) -> int:
    """A model that is read only, held by the trainer's backend."""
    megatron = get_megatron_flags(config, plan.device)
    return estimate_rank_frozen_bytes(spec, plan.layout, plan.dtype, megatron=megatron, stage=stage)


def _estimate_policy(config: Config, plan: Plan, spec: DecoderSpec, stage: int) -> tuple[MemoryShare, ...]:
    """The policy in training, or this rank's shard of it."""
    if (lora := build_lora(config.lora, spec)) is not None:
        return _estimate_lora(config, plan, spec, lora, stage)
    dtype = plan.dtype
    layout = plan.layout
    train = config.train
    megatron = get_megatron_flags(config, plan.device)
    memory = estimate_rank_memory(
        spec,
        layout,
        dtype,
        moments=train.optimizer_state_dtype,
        optimizer=train.optimizer,
        frozen_vision=get_frozen_vision(train),
        megatron=megatron,
        stage=stage,
    )
    shards = layout.tensor * layout.pipeline * (layout.shard_group_size if megatron is None else 1)
    part = "" if layout.world == 1 else f", rank shard of {layout.world} ranks, sharded {shards} ways"
    sharded = megatron is None and layout.shard_group_size * layout.replicate > 1
    kind = "momentum and moments" if train.optimizer == "muon" else "two moments"
    masters = kind if sharded or dtype == "float32" else f"{kind} and float32 masters"
    form = "" if train.optimizer_state_dtype == "float32" else f" in {train.optimizer_state_dtype}"
    note = f"{train.optimizer.capitalize()}: {masters}{form}"
    if megatron is not None and megatron.distributed_optimizer:
        note += f", of 1/{layout.shard_group_size * layout.replicate} of the values"
    on_gpu = plan.device != "cpu"
    host = on_gpu and config.parallel.fsdp_cpu_offload
    peak = _find_single_peak(config, plan, spec)
    gradients = MemoryShare(name="gradients", bytes=memory.gradients, note="float32")
    if peak is not None:
        present = f"float32, of {format_bytes(memory.gradients)} those there while activations are at their widest"
        gradients = MemoryShare(name="gradients", bytes=peak.gradients, note=present)
    shares = (
        _place(host, MemoryShare(name="weights", bytes=memory.weights, note=("float32" if sharded else dtype) + part)),
        _place(host, gradients),
        _place(
            host or (on_gpu and train.optimizer_cpu_offload),
            MemoryShare(name="optimizer", bytes=memory.optimizer, note=note),
        ),
    )
    if not memory.gathered:
        return shares
    note = f"{dtype}: embedding, head, and one layer at a time with its gradients"
    return (*shares, MemoryShare(name="gathered", bytes=memory.gathered, note=note))


def _estimate_lora(
    config: Config, plan: Plan, spec: DecoderSpec, lora: LoraSpec, stage: int
) -> tuple[MemoryShare, ...]:
    """The policy with LoRA: every rank has all adapters, and its shard of the rest."""
    dtype = plan.dtype
    layout = plan.layout
    train = config.train
    is_packed = packs_base(config)
    if is_packed:
        spec = replace(spec, quantization=get_rollout_quantization(config))
    megatron = get_megatron_flags(config, plan.device)
    memory = estimate_rank_lora_memory(
        spec, layout, dtype, lora, moments=train.optimizer_state_dtype, megatron=megatron, stage=stage
    )
    shards = layout.shard_group_size if megatron is None else layout.tensor * layout.pipeline
    part = "" if layout.world == 1 else f", one of {shards} shards"
    form = "" if train.optimizer_state_dtype == "float32" else f" in {train.optimizer_state_dtype}"
    note = f"Adam: two moments of adapters{form}"
    if megatron is not None and megatron.distributed_optimizer:
        note += f", of 1/{layout.world} of the values"
    host = plan.device != "cpu" and train.optimizer_cpu_offload
    base = (
        MemoryShare(name="weights", bytes=memory.weights, note=f"{dtype}, with adapters merged{part}"),
        MemoryShare(name="base", bytes=memory.base, note=f"{dtype}: base weights of adapted modules"),
    )
    if is_unmerged(config):
        held = f"packed in {config.models.train_precision}" if is_packed else dtype
        base = (MemoryShare(name="weights", bytes=memory.weights, note=f"{held}, frozen{part}"),)
    shares = (
        *base,
        MemoryShare(
            name="adapters",
            bytes=memory.adapters,
            note=f"float32: {lora.num_parameters:,} parameters of rank {lora.rank}",
        ),
        MemoryShare(name="gradients", bytes=memory.gradients, note="float32, of the adapters only"),
        _place(host, MemoryShare(name="optimizer", bytes=memory.optimizer, note=note)),
    )
    if not memory.gathered:
        return shares
    return (
        *shares,
        MemoryShare(name="gathered", bytes=memory.gathered, note=f"{dtype}: embedding, head, and one layer at a time"),
    )


def _place(host: bool, share: MemoryShare) -> MemoryShare:
    """The share, which takes no GPU memory where it is in host memory."""
    return replace(share, bytes=0, note=f"{share.note}, {format_bytes(share.bytes)} of host memory") if host else share


def _estimate_critic(config: Config, plan: Plan, policy: DecoderSpec, stage: int) -> tuple[MemoryShare, ...]:
    """The critic; on a device of its own it takes no memory here."""
    if plan.critic is not None and shares_critic(config):
        lora = build_lora(config.lora, policy)
        assert lora is not None
        weights, optimizer = estimate_adapter_critic_bytes(
            policy,
            lora,
            plan.layout,
            config.train.optimizer_state_dtype,
            megatron=get_megatron_flags(config, plan.device),
        )
        return (
            MemoryShare(name="critic", bytes=weights, note="float32: adapters over the policy's base, and a head"),
            MemoryShare(name="critic grad", bytes=weights, note="float32"),
            _place(
                plan.device != "cpu" and config.train.optimizer_cpu_offload,
                MemoryShare(name="critic adam", bytes=optimizer, note="its own optimizer"),
            ),
        )
    spec = None if plan.critic is None else read_spec_or_none(str(plan.critic), config.models.model_impl)
    if spec is None:
        return ()
    dtype, device = plan.dtype, config.train.critic_device
    if device not in ("auto", plan.device):
        return (MemoryShare(name="critic", bytes=0, note=f"on {device}, from {plan.critic}"),)
    train = config.train
    memory = estimate_rank_critic_memory(
        spec,
        plan.layout,
        dtype,
        moments=train.optimizer_state_dtype,
        optimizer=train.optimizer,
        frozen_vision=get_frozen_vision(train),
        megatron=get_megatron_flags(config, plan.device),
        stage=stage,
    )
    on_gpu = plan.device != "cpu"
    host = on_gpu and config.parallel.fsdp_cpu_offload
    shares = (
        _place(host, MemoryShare(name="critic", bytes=memory.weights, note=f"{dtype}, from {plan.critic}")),
        _place(host, MemoryShare(name="critic grad", bytes=memory.gradients, note="float32")),
        _place(
            host or (on_gpu and train.optimizer_cpu_offload),
            MemoryShare(name="critic adam", bytes=memory.optimizer, note="its own optimizer"),
        ),
    )
    if not memory.gathered:
        return shares
    return (*shares, MemoryShare(name="critic gathered", bytes=memory.gathered, note=f"{dtype}: as the policy's"))


def _count_factors(config: Config, spec: DecoderSpec) -> int:
    """Number of values of the adapters that an engine applies beside its weights."""
    lora = build_lora(config.lora, spec)
    if lora is None:
        return 0
    # Slots of named versions have room for one more, and factors that experts share are there for each expert.
    if names_versions(config):
        return replace(lora, shared_outer=False).num_parameters * (config.lora.lora_versions + 1)
    return lora.num_parameters


def estimate_adapter_critic_bytes(
    spec: DecoderSpec,
    lora: LoraSpec,
    layout: ParallelDims,
    moments: str = "float32",
    *,
    megatron: MegatronMemoryFlags | None = None,
) -> tuple[int, int]:
    """Weights (and as many gradients) and optimizer of a critic that is adapters and a head over the policy's base."""
    shapes = [*lora.list_shapes(), (1, spec.hidden_size), (1,)]
    return 4 * sum(map(prod, shapes)), estimate_moment_bytes(shapes, layout, moments, megatron=megatron)


def estimate_critic_bytes(spec: DecoderSpec, dtype: str) -> tuple[int, int, int]:
    """Weights, gradients and optimizer of a critic in one process."""
    memory = estimate_rank_critic_memory(spec, ParallelDims(), dtype)
    return memory.weights, memory.gradients, memory.optimizer


def _estimate_teachers(config: Config, plan: Plan, stage: int) -> tuple[MemoryShare, ...]:
    """Frozen teacher models, all in memory at once."""
    found = {name: read_spec_or_none(str(folder), config.models.model_impl) for name, folder in plan.teachers.items()}
    total = sum(_estimate_frozen(config, plan, spec, stage) for spec in found.values() if spec is not None)
    note = ", ".join(f"{name}: {plan.teachers[name]}" for name in found)
    return (MemoryShare(name="teacher", bytes=total, note=f"{plan.dtype}, {note}"),) if found else ()


def _count_step_tokens(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[int, int]:
    """Tokens of a micro-batch, which has no more than the global batch, and of the longest sample."""
    longest = resolve_context_limit(config.rollout, spec.max_positions)
    return min(config.train.max_tokens_per_gpu * plan.layout.context, plan.global_batch_size * longest), longest


def _makes_single_samples(config: Config) -> bool:
    """Whether a trajectory is one sample for certain."""
    rollout, hooks = config.rollout, config.hooks
    is_own = rollout.custom_generate_function_path in (None, "single_turn") and rollout.loss_mask_type != "each"
    is_own &= not any((hooks.rollout_function_path, hooks.rollout_data_postprocess_path))
    is_own &= not any((config.agents.custom_agent_function_path, config.multi_agent.policies))
    return is_own and config.algo.loss_type not in PREFERENCE_LOSSES


def _bound_step_counts(config: Config, plan: Plan, spec: DecoderSpec) -> StepCounts:
    """The micro-batches that a rank may have in a step, where a trajectory is one sample; else of any number."""
    if not _makes_single_samples(config):
        return StepCounts()
    train = config.train
    tokens, longest = _count_step_tokens(config, plan, spec)
    return bound_step_counts(
        plan.global_batch_size,
        longest,
        plan.layout.data_parallel_size,
        tokens,
        samples_each=None if train.use_dynamic_batch_size else train.micro_batch_size,
        limited=train.max_patches_per_gpu is not None,
    )


def _find_single_peak(config: Config, plan: Plan, spec: DecoderSpec) -> StepPeak | None:
    """The peak of a step that is one micro-batch for certain; None where it may be several, whose gradients add up.

    For certain in one process, where all samples of a global batch fit into a micro-batch at their greatest length and
    a trajectory is one sample.
    """
    train = config.train
    tokens, longest = _count_step_tokens(config, plan, spec)
    fits = plan.global_batch_size * longest <= train.max_tokens_per_gpu and train.max_patches_per_gpu is None
    if train.micro_batch_size is not None and not train.use_dynamic_batch_size:
        fits &= plan.global_batch_size <= train.micro_batch_size
    is_alone = not is_distributed(config) and not config.lora.is_enabled and not isinstance(spec, HfAdapterSpec)
    if not (fits and is_alone and _makes_single_samples(config)):
        return None
    gradients = estimate_rank_memory(spec, plan.layout, plan.dtype, frozen_vision=get_frozen_vision(train)).gradients
    return estimate_single_peak(
        replace(spec, quantization=config.models.train_quantization(packed=False)),
        gradients,
        plan.dtype,
        tokens,
        train,
        fused=plan.device != "cpu",
        longest=longest,
        numerics=config.models.numerics,
    )


def _estimate_activations(config: Config, plan: Plan, spec: DecoderSpec, stage: int) -> MemoryShare:
    """Activations kept for the backward pass, of a pipeline stage those of all micro-batches in flight."""
    tokens, longest = _count_step_tokens(config, plan, spec)
    recompute = {"none": "", "full": ", layers recomputed", "selective": ", all but matmuls and attention recomputed"}
    note = f"{tokens:,} tokens at once" + recompute[get_counted_recompute(config.train)]
    if plan.layout.context > 1:
        note += f", over {plan.layout.context} context ranks"
    peak = _find_single_peak(config, plan, spec)
    if peak is not None:
        return MemoryShare(name="activations", bytes=peak.activations, note=f"{note}, all of a step")
    lora = build_lora(config.lora, spec)
    spec = replace(spec, quantization=config.models.train_quantization(packed=packs_base(config)))
    flags = get_megatron_flags(config, plan.device)
    if flags is None or plan.layout.pipeline == 1:
        size = estimate_rank_activations(
            spec,
            plan.layout,
            plan.dtype,
            tokens,
            config.train,
            fused=plan.device != "cpu",
            longest=longest,
            numerics=config.models.numerics,
            lora=lora,
        )
        return MemoryShare(name="activations", bytes=size, note=note)
    step_counts = _bound_step_counts(config, plan, spec)
    size = estimate_stage_activations(
        spec,
        plan.layout,
        plan.dtype,
        tokens,
        config.train,
        stage=stage,
        flags=flags,
        counts=step_counts,
        fused=plan.device != "cpu",
        longest=longest,
        numerics=config.models.numerics,
        lora=lora,
    )
    count = _count_in_flight(config, plan, spec, stage)
    note += f", micro-batches in flight: {count} of stage {stage + 1} of {plan.layout.pipeline}"
    note += f", in {flags.virtual} virtual ones" if flags.virtual > 1 else ""
    return MemoryShare(name="activations", bytes=size, note=note)


def _count_in_flight(config: Config, plan: Plan, spec: DecoderSpec, stage: int) -> int:
    """Number of micro-batches whose activations the first layers of a stage have at once."""
    flags = get_megatron_flags(config, plan.device)
    if flags is None or plan.layout.pipeline == 1:
        return 1
    return count_in_flight(plan.layout, stage, flags, _bound_step_counts(config, plan, spec))


def _estimate_vision(config: Config, plan: Plan, spec: DecoderSpec, stage: int) -> tuple[MemoryShare, ...]:
    """Activations of the vision tower, if it is trained on data with images; of a pipeline's on the first stage.

    A feature takes a token, so that a micro-batch of --max-tokens-per-gpu has no more patches than those of as many
    features; --max-patches-per-gpu bounds them further.
    """
    train = config.train
    if spec.vision is None or train.freeze_vision_tower or config.lora.is_enabled or stage > 0:
        return ()
    if train.max_patches_per_gpu is None and not config.rollout.multimodal_keys:
        return ()
    most = train.max_tokens_per_gpu * spec.vision.merge_size**2
    patches = min(most, train.max_patches_per_gpu or most)
    recomputed = get_recompute_mode(train) != "none"
    size = vision_activation_bytes(
        spec, patches, size=BYTES[plan.dtype], fused=plan.device != "cpu", recomputed=recomputed
    )
    note = f"activations of {patches:,} image patches at once" + (", blocks recomputed" if recomputed else "")
    if (count := _count_in_flight(config, plan, spec, stage)) > 1:
        size, note = size * count, f"{note}, of each of {count} micro-batches"
    if patches == most:
        note += ", if all tokens are of images; --max-patches-per-gpu lowers it"
    return (MemoryShare(name="vision tower", bytes=size, note=note),)


def _estimate_draft_training(config: Config, plan: Plan, spec: DecoderSpec, stage: int) -> tuple[MemoryShare, ...]:
    """The draft model that is trained beside the policy; every rank has all of it, and the last stage runs it."""
    draft = read_trained_draft(config, spec)
    if draft is None:
        return ()
    train, dtype = config.train, plan.dtype
    on_gpu = plan.device != "cpu"
    weights = draft_weight_bytes(draft, dtype)
    longest = config.rollout.rollout_max_context_len or spec.max_positions
    tokens = min(train.max_tokens_per_gpu * plan.layout.context, plan.global_batch_size * longest)
    activations = _count_sent_features(plan, spec, draft, tokens) * BYTES[dtype]
    activations *= _count_in_flight(config, plan, spec, stage) if stage > 0 else 1
    if stage == plan.layout.pipeline - 1:
        activations += draft_activation_bytes(
            draft,
            tokens,
            train.draft_train_steps,
            longest=min(longest, tokens),
            dtype=dtype,
            fused=on_gpu,
            gathered=_gathers_vocabulary(config, plan),
        )
    optimizer = MemoryShare(
        name="draft adam",
        bytes=draft_optimizer_bytes(draft, dtype, train.optimizer_state_dtype),
        note="two moments" if dtype == "float32" else "two moments and float32 masters",
    )
    return (
        MemoryShare(name="draft", bytes=weights, note=f"{dtype}: {_describe_draft(draft)}, whole on every rank"),
        MemoryShare(name="draft grad", bytes=4 * weights // BYTES[dtype], note="float32"),
        _place(on_gpu and train.optimizer_cpu_offload, optimizer),
        MemoryShare(
            name="draft activations",
            bytes=activations,
            note=f"{train.draft_train_steps} steps of {tokens:,} tokens, beside the policy's",
        ),
    )


def _gathers_vocabulary(config: Config, plan: Plan) -> bool:
    """Whether a rank has copies of the policy's embedding and head for the draft, or reads its own."""
    if plan.layout.tensor > 1:
        return True
    # Megatron's stages have one of the two, and its trained parameters are float32 masters.
    return config.train.train_backend == "megatron" and (plan.layout.pipeline > 1 or plan.dtype != "float32")


def _count_sent_features(plan: Plan, spec: DecoderSpec, draft: DraftSpec, tokens: int) -> int:
    """Number of values of captured layers that go to a pipeline stage with a micro-batch: at most those of all."""
    layout = plan.layout
    if layout.pipeline == 1:
        return 0
    slots = -(-tokens // (layout.context * (layout.tensor if layout.sequence else 1)))
    streams = spec.streams if spec.altup is None else spec.altup.streams
    return len(set(draft.capture_layers)) * streams * spec.hidden_size * slots


def _describe_draft(draft: DraftSpec | DecoderSpec) -> str:
    if isinstance(draft, DecoderSpec):
        return f"a {draft.family} model of {parameter_count(draft):,} parameters"
    return "EAGLE-3 head" if draft.kind == "eagle3" else f"{draft.num_layers} MTP layers"


def _estimate_engine_draft(
    config: Config, plan: Plan, draft: DraftSpec | DecoderSpec | None, tokens: int, dtype: str
) -> tuple[MemoryShare, ...]:
    """What an engine drafts with: its weights, and keys and values for as many tokens as the policy's."""
    if draft is None:
        return ()
    trained = plan.transport == "shared" and config.train.draft_train == config.native.speculative_algorithm
    weights = draft_weight_bytes(draft, dtype) if isinstance(draft, DraftSpec) else weight_bytes(draft, dtype)
    note = "shares the trainer's" if trained else _describe_draft(draft)
    layers = draft.decoder if isinstance(draft, DraftSpec) else draft
    cache = tokens * kv_bytes_per_token(layers, dtype, config.models.numerics)
    return (
        MemoryShare(name="engine draft", bytes=0 if trained else weights, note=note),
        MemoryShare(name="draft kv cache", bytes=cache, note=f"{tokens:,} tokens"),
    )


def _estimate_states(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[MemoryShare, ...]:
    """The states of recurrent layers, for each running request."""
    each = state_bytes_per_sequence(spec, plan.dtype)
    running = count_running_requests(config, plan.device, spec)
    drafts = config.native.count_draft_states(spec.recurrent)
    cached = config.native.count_cached_states(each)
    note = f"of {running} requests" + (f", {drafts} drafted tokens" if drafts else "")
    note += f" and {cached} prefixes" if cached else ""
    return (MemoryShare(name="states", bytes=each * (running + drafts + cached), note=note),) if each else ()


def _estimate_graphs(config: Config, plan: Plan, spec: DecoderSpec, dtype: str) -> tuple[MemoryShare, ...]:
    """The memory pool of the native engine's CUDA graphs."""
    several = config.cluster.rollout_num_gpus_per_engine > 1
    used = config.native.engine_cuda_graph and config.sglang.rollout_backend != "sglang"
    numerics = config.models.numerics
    if plan.device == "cpu" or several or not used or not has_decode_graphs(spec, numerics):
        return ()
    running = count_running_requests(config, plan.device, spec)
    size = graph_pool_bytes(spec, running, dtype, numerics)
    largest = count_prefill_graph_tokens(spec) if has_prefill_graphs(spec) else running
    note = f"steps of up to {largest:,} tokens"
    return (MemoryShare(name="CUDA graphs", bytes=size, note=note),)


def _estimate_images(config: Config, spec: DecoderSpec, dtype: str) -> tuple[MemoryShare, ...]:
    """The features of images that the engine keeps, and the activations of its vision tower."""
    cache = config.native.engine_vision_cache_mib << 20
    size = vision_bytes(spec, dtype, cache)
    note = f"{format_bytes(cache)} of features, and the vision tower's activations"
    return (MemoryShare(name="images", bytes=size, note=note),) if size else ()


def bound_request_length(config: Config, plan: Plan, positions: int) -> int:
    """Tokens that no request of a run exceeds, its response included.

    With limits of prompts and responses it is their sum, where Miles itself makes each request from one prompt; in
    evaluation too. Elsewhere (turns, agents, functions of the user's) it is the context limit.
    """
    rollout, hooks = config.rollout, config.hooks
    limit = resolve_context_limit(rollout, positions)
    is_own = _makes_single_samples(config) and hooks.data_source_path is None and hooks.eval_function_path is None
    if not is_own or rollout.rollout_max_prompt_len is None:
        return limit
    lengths = [rollout.rollout_max_prompt_len + rollout.rollout_max_response_len]
    for name in plan.eval_sets:
        own = replace(rollout, **list_set_options(rollout, name))
        prompt = own.eval_max_prompt_len or rollout.rollout_max_prompt_len
        lengths.append(prompt + (own.eval_max_response_len or rollout.rollout_max_response_len))
    return min(limit, max(lengths))


def estimate_kv_tokens(
    config: Config, plan: Plan, spec: DecoderSpec, draft: DraftSpec | DecoderSpec | None = None
) -> tuple[int, str]:
    """How many tokens the KV cache needs, and why: those of all requests that run at once, within the memory.

    The engine takes more where it has the memory: requests of as many tokens as the model has positions. The keys of a
    ``draft`` take memory beside the policy's.
    """
    if config.native.engine_kv_tokens is not None:
        return config.native.engine_kv_tokens, "--engine-kv-tokens"
    page, running = config.native.engine_page_size, count_running_requests(config, plan.device, spec)
    part = config.native.engine_memory_fraction
    longest = bound_request_length(config, plan, spec.max_positions)
    most = running * (-(-longest // page) * page)
    why = f"{running} requests of {longest:,} positions"
    if plan.device != "cpu":
        room = "" if longest == spec.max_positions else f", room for {spec.max_positions:,} each"
        return most, f"{why} at most; the engine takes at most {part:.0%} of the free memory{room}"
    free = get_free_memory()
    layers = [spec] if draft is None else [spec, draft.decoder if isinstance(draft, DraftSpec) else draft]
    each = max(1, sum(kv_bytes_per_token(part, plan.dtype, config.models.numerics) for part in layers))
    images = vision_bytes(spec, plan.dtype, config.native.engine_vision_cache_mib << 20)
    fits = most if free is None else max(0, int(free * part) - images) // each
    return (most, why) if most <= fits else (fits, f"{part:.0%} of the free memory")


def format_bytes(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
