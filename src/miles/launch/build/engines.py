"""Engines in this process: the native engine of a policy, how weights are published to it, and its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from miles.backends.native.config import HEAD_ALGORITHMS
from miles.backends.native.engine.adapter_versions import AdapterVersionSync
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.lora_config import LoraServingConfig
from miles.backends.native.runner.lora import list_served_modules
from miles.cluster import platform
from miles.cluster.executor import Executor, InlineExecutor
from miles.core.errors import UsageError
from miles.core.protocols import WeightSync
from miles.core.types import Version
from miles.kernels.numerics import Numerics
from miles.launch.build.draft_model import load_engine_draft, name_head_weights
from miles.launch.build.models import PolicyCheckpoint, load_model
from miles.launch.config import Config
from miles.launch.plan.drafts import choose_speculation, drafts_with_mtp
from miles.launch.plan.lora import names_versions
from miles.launch.plan.running_requests import count_running_requests
from miles.models.base import CausalLM
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.draft.base import Draft
from miles.models.draft.checkpoint import read_mtp_spec
from miles.models.draft.mtp import MtpDraft
from miles.models.draft.param_map import build_draft_map
from miles.models.draft.spec import DRAFT_PREFIX
from miles.models.lora.adapters import LoraAdapters
from miles.models.lora.factors import LoraFactors, read_factors
from miles.models.lora.layout import build_factor_map
from miles.models.lora.targets import EXPERTS, LM_HEAD
from miles.models.model_provider import apply_model_provider
from miles.models.packing import pack_params
from miles.models.spec import DecoderSpec
from miles.sync.publish import Publication, Transport

if TYPE_CHECKING:
    from miles.backends.remote.remote_engine import RemoteEngine

GetWeights = Callable[[], Mapping[str, Tensor]]
RolloutEngine: TypeAlias = "NativeEngine | RemoteEngine"
"""An engine that samples for a run; it can sleep, wake up and close."""


def build_native_engine(
    config: Config,
    policy: PolicyCheckpoint,
    run: Executor,
    model: CausalLM | None,
    *,
    name: str = "engine 0",
    frees_cache: bool = True,
) -> NativeEngine:
    """An engine without weights for the architecture of ``model``, or of the checkpoint where there is none."""
    spec = policy.spec if model is None else model.spec
    lora = _build_version_slots(config, policy)
    if lora is not None:
        policy = replace(policy, rollout_adapters=None)
    running = count_running_requests(config, policy.platform.kind, spec)
    return NativeEngine(
        policy.to_rollout_spec(spec),
        device=policy.platform.device,
        dtype=policy.rollout_dtype,
        config=choose_speculation(config).apply(replace(config.native, engine_max_running=running)),
        run=run,
        decode=policy.tokenizer.decode,
        numerics=policy.numerics,
        name=name,
        model=None if model is None else _build_empty_model(policy, model),
        devices=platform.consecutive_devices(policy.platform.device, config.cluster.rollout_num_gpus_per_engine),
        draft=_load_draft(config, policy, spec),
        lora=lora,
        return_indexer_topk=config.algo.use_rollout_indexer_replay,
        frees_cache=frees_cache,
    )


def _build_version_slots(config: Config, policy: PolicyCheckpoint) -> LoraShape | None:
    """Room for the versions of the run's adapters that the engine holds by name, and for one that is still used."""
    adapters = policy.rollout_adapters
    if adapters is None or not names_versions(config):
        return None
    return LoraShape(num_slots=config.lora.lora_versions + 1, max_rank=adapters.rank, modules=adapters.modules)


def _load_draft(config: Config, policy: PolicyCheckpoint, spec: DecoderSpec) -> CausalLM | Draft | None:
    return load_engine_draft(
        config.native,
        policy.folder,
        spec,
        device=policy.platform.device,
        dtype=policy.rollout_dtype,
        numerics=policy.numerics,
        head=config.train.draft_load,
    )


def _build_empty_model(policy: PolicyCheckpoint, model: CausalLM) -> CausalLM | None:
    """The module that published weights are written into; None where the engine builds it."""
    empty = hf.build_engine_model(model)
    if policy.provide is None or empty is not None:
        return empty
    spec = policy.to_rollout_spec(model.spec)
    decoder = Decoder(spec, device="meta", dtype=policy.rollout_dtype, numerics=policy.numerics)
    return apply_model_provider(decoder, policy.provide)


def build_native_sync(
    config: Config,
    policy: PolicyCheckpoint,
    engine: NativeEngine | None,
    weights: GetWeights,
    run: Executor,
    *,
    copies: bool,
    adapters: LoraAdapters | None,
    draft: GetWeights | None = None,
) -> WeightSync:
    """The weight sync to an engine in this process; weights are shared unless it ``copies`` them.

    ``draft`` returns the trained weights of the engine's draft head, which it otherwise keeps as they were loaded.
    """
    published = get_rollout_weights(policy, weights)
    if policy.rollout_adapters is not None and names_versions(config):
        return _build_version_sync(config, policy, engine, published, run)
    # Factors of adapters beside the weights are made for each update.
    is_made = published is not weights or policy.rollout_adapters is not None
    if engine is not None and engine.draft_head is not None:
        published = _add_head_weights(published, engine.draft_head, draft)
    transport: Transport = "made" if is_made else "copy" if copies else "shared"
    trained = None if adapters is None else frozenset(adapters.targets_by_param)
    if policy.rollout_adapters is not None:
        trained = frozenset(build_factor_map(policy.rollout_spec))
    if trained is not None and draft is not None:
        trained |= {DRAFT_PREFIX + name for name in draft()}
    return Publication(
        weights=published,
        engines=[] if engine is None else [engine],
        transport=transport,
        run=run,
        trained=trained,
    )


def _build_version_sync(
    config: Config, policy: PolicyCheckpoint, engine: NativeEngine | None, weights: GetWeights, run: Executor
) -> AdapterVersionSync:
    """Each version of the adapters under its own name; the base, with a draft head, is published once."""
    factors = frozenset(build_factor_map(policy.rollout_spec))

    def get_base() -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in weights().items() if name not in factors}

    head = None if engine is None else engine.draft_head
    base = Publication(
        weights=get_base if head is None else _add_head_weights(get_base, head, None),
        engines=[] if engine is None else [engine],
        transport="shared",
        run=run,
    )
    return AdapterVersionSync(base, engine, weights, policy.rollout_spec, run, keep=config.lora.lora_versions)


def get_server_weights(
    config: Config, policy: PolicyCheckpoint, weights: GetWeights, draft: GetWeights | None
) -> GetWeights:
    """The trainer's weights as servers have them, with those of their draft head, if they have one.

    ``draft`` returns the trained weights of the head; without it, it is sent as it was loaded.
    """
    published = get_rollout_weights(policy, weights)
    named = config.sglang.rollout_backend == "sglang" or names_versions(config)
    if named and policy.rollout_adapters is not None:
        return _select_factors(policy, published)
    if config.sglang.rollout_backend == "sglang":
        return _add_mtp_weights(config, policy, published, draft) if draft is not None else published
    if config.native.speculative_algorithm not in HEAD_ALGORITHMS:
        return published
    head = _load_draft(config, policy, policy.spec)
    assert isinstance(head, Draft)
    return _add_head_weights(published, head, draft)


def _select_factors(policy: PolicyCheckpoint, weights: GetWeights) -> GetWeights:
    """The LoRA factors alone: servers have the base from the checkpoint that they load."""
    factors = frozenset(build_factor_map(policy.rollout_spec))
    return lambda: {name: tensor for name, tensor in weights().items() if name in factors}


def _add_mtp_weights(config: Config, policy: PolicyCheckpoint, weights: GetWeights, trained: GetWeights) -> GetWeights:
    """The weights with those of trained MTP layers under their checkpoint names, if SGLang drafts with them."""
    if not drafts_with_mtp(config):
        return weights
    draft = MtpDraft(
        read_mtp_spec(policy.folder, policy.spec), device="meta", dtype=policy.rollout_dtype, numerics=policy.numerics
    )
    dtypes = {name: parameter.dtype for name, parameter in draft.named_parameters()}
    slices = build_draft_map(draft.spec)

    def add() -> Mapping[str, Tensor]:
        own = {name: tensor.detach().to(dtypes[name]) for name, tensor in trained().items()}
        pieces = {DRAFT_PREFIX + p.hf_name: p.view(own[name]) for name, parts in slices.items() for p in parts}
        return {**weights(), **pieces}

    return add


def _add_head_weights(weights: GetWeights, head: Draft, trained: GetWeights | None) -> GetWeights:
    """The weights with those of the engine's draft head: the ``trained`` ones in its dtype, or as they were loaded."""
    loaded = name_head_weights(head)

    def add() -> Mapping[str, Tensor]:
        if trained is None:
            return {**weights(), **loaded}
        own = {DRAFT_PREFIX + name: tensor.detach() for name, tensor in trained().items()}
        return {**weights(), **{name: own[name].to(tensor.dtype) for name, tensor in loaded.items()}}

    return add


async def load_engine(config: Config, policy: PolicyCheckpoint, *, name: str = "actor") -> NativeEngine:
    """An engine with the checkpoint's own weights, as version 0 of the policy ``name``."""
    source = replace(policy, dtype=policy.rollout_dtype, spec=policy.rollout_spec)
    if config.cluster.rollout_num_gpus_per_engine > 1:  # the whole model need not fit on one GPU
        source = replace(source, platform=platform.detect_platform("cpu"))
    model = load_model(source)
    engine = build_native_engine(config, policy, InlineExecutor(), model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    if engine.draft_head is not None:
        weights |= name_head_weights(engine.draft_head)
    sync = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=InlineExecutor())
    await sync.publish(Version(name))
    return engine


def get_rollout_weights(policy: PolicyCheckpoint, weights: GetWeights) -> GetWeights:
    """The trainer's weights as the engine has them: the same tensors where nothing differs, else new ones.

    Weights that the engine has quantized are packed from their values in the trainer's dtype, which are those that its
    forward quantizes; a packed base under LoRA adapters is what it is. Parameters that must keep their precision keep
    their dtype.
    """
    trained = policy.spec.quantization
    quantized = policy.rollout_quantization is not None and not (trained is not None and trained.packed)
    if policy.rollout_dtype == policy.dtype and not quantized:
        return weights
    spec = policy.rollout_spec
    decoder = Decoder(spec, device="meta", dtype=policy.rollout_dtype, numerics=policy.numerics)
    dtypes = {name: parameter.dtype for name, parameter in decoder.named_parameters()}

    def convert() -> dict[str, Tensor]:
        own = weights()
        tensors = pack_params(spec, own, policy.dtype) if quantized else own
        return {
            name: tensor.detach().to(dtypes[name], copy=name in own and tensor is own[name])
            for name, tensor in tensors.items()
        }

    return convert


_DEFAULT_RANK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraServing:
    """The room for adapters, and the adapters to load at start: name, folder and factors of each."""

    shape: LoraShape
    adapters: tuple[tuple[str, Path, LoraFactors], ...]


def build_lora_serving(config: LoraServingConfig, spec: DecoderSpec, numerics: Numerics) -> LoraServing | None:
    """Read the adapters of --lora-paths; None if no adapters are served; raises UsageError."""
    if not config.is_enabled:
        return None
    adapters: dict[str, tuple[str, Path, LoraFactors]] = {}
    for word in config.lora_paths:
        name, separator, folder = word.partition("=")
        if not separator:
            folder = name
        if not name or not folder or name in adapters:
            raise UsageError(f"--lora-paths {word} must be NAME=FOLDER, and each name is given once.")
        adapters[name] = (name, Path(folder), read_factors(Path(folder), spec))
    modules = list_served_modules(spec, config.lora_target_modules, numerics)
    if not config.lora_target_modules:
        targeted = {module for _, _, factors in adapters.values() for module in factors.modules}
        others = (LM_HEAD, EXPERTS) if spec.moe is not None else (LM_HEAD,)
        modules += tuple(module for module in list_served_modules(spec, others, numerics) if module in targeted)
    largest = max((factors.rank for _, _, factors in adapters.values()), default=_DEFAULT_RANK)
    shape = LoraShape(
        num_slots=config.max_loras_per_batch,
        max_rank=config.max_lora_rank or largest,
        modules=modules,
        max_loaded=config.max_loaded_loras,
    )
    return LoraServing(shape=shape, adapters=tuple(adapters.values()))


def load_adapters(engine: NativeEngine, serving: LoraServing | None) -> None:
    """Load the adapters of --lora-paths into an engine."""
    for name, folder, factors in () if serving is None else serving.adapters:
        engine.load_lora(name, factors, folder=folder)
